#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#define INDEX_BITS 48
#define EVENTS 64

/* --- what is asked ------------------------------------------------------------------------ */

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

static void *must(void *memory) {
    if (memory == NULL) fail("out of memory");
    return memory;
}

static const char *text_of(int argc, char **argv, const char *key, const char *otherwise) {
    size_t length = strlen(key);
    for (int i = 1; i < argc; i++)
        if (strncmp(argv[i], key, length) == 0 && argv[i][length] == '=') return argv[i] + length + 1;
    return otherwise;
}

static uint64_t number_of(int argc, char **argv, const char *key, uint64_t otherwise) {
    const char *text = text_of(argc, argv, key, NULL);
    if (text == NULL) return otherwise;
    char *end;
    errno = 0;
    uint64_t number = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || *text == '-')
        fail("%s is a number of at least 0, not %s", key, text);
    return number;
}

static int small_of(int argc, char **argv, const char *key, int otherwise) {
    uint64_t number = number_of(argc, argv, key, (uint64_t)otherwise);
    if (number > 1 << 30) fail("%s is too large: %llu", key, (unsigned long long)number);
    return (int)number;
}

static double decimal_of(int argc, char **argv, const char *key, double otherwise) {
    const char *text = text_of(argc, argv, key, NULL);
    if (text == NULL) return otherwise;
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end != '\0' || !(number > 0)) fail("%s is a number above 0, not %s", key, text);
    return number;
}

/* Takes host and port out of scheme://[user:password@]host:port[/...]. */
static void split_url(struct work *work, const char *url, int default_port) {
    const char *start = strstr(url, "://");
    start = start == NULL ? url : start + 3;
    const char *at = strchr(start, '@');
    if (at != NULL) start = at + 1;
    size_t length = strcspn(start, ":/?");
    if (length == 0) fail("no host in the url %s", url);
    work->host = must(strndup(start, length));
    work->port = start[length] == ':' ? atoi(start + length + 1) : default_port;
    if (work->port <= 0) fail("no port in the url %s", url);
}

struct work parse_work(int argc, char **argv, int default_port) {
    struct work work = {
        .role = text_of(argc, argv, "role", ""),
        .mode = text_of(argc, argv, "mode", ""),
        .subject = text_of(argc, argv, "subject", "perf"),
        .form = text_of(argc, argv, "form", "bulk"),
        .choice = text_of(argc, argv, "select", "whole"),
        .size = number_of(argc, argv, "size", 140),
        .count = number_of(argc, argv, "count", 1000),
        .first = number_of(argc, argv, "first", 0),
        .from_ns = (int64_t)number_of(argc, argv, "from_ns", 0),
        .seed = number_of(argc, argv, "seed", 1),
        .rare = number_of(argc, argv, "rare", 0),
        .window = small_of(argc, argv, "window", 4096),
        .producer = small_of(argc, argv, "producer", 0),
        .producers = small_of(argc, argv, "producers", 1),
        .subscribers = small_of(argc, argv, "subscribers", 1),
        .flight = small_of(argc, argv, "flight", 64),
        .workers = small_of(argc, argv, "workers", 1),
        .subjects = small_of(argc, argv, "subjects", 1),
        .rate = decimal_of(argc, argv, "rate", 1000),
        .idle_s = decimal_of(argc, argv, "idle_s", 20),
        .paced = number_of(argc, argv, "paced", 0) != 0,
    };
    if (work.size < 8) fail("a record of %zu bytes has no room for its number", work.size);
    if (work.count == 0) fail("count is at least 1");
    if (work.window == 0 || work.flight == 0 || work.subjects == 0 || work.producers == 0 || work.subscribers == 0 ||
        work.workers == 0)
        fail("window, flight, subjects, producers, subscribers and workers are at least 1");
    if (work.first >= work.count) fail("first is below count");
    split_url(&work, text_of(argc, argv, "url", ""), default_port);
    return work;
}

/* --- the course of a role ----------------------------------------------------------------- */

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static double cpu_s(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec / 1e9;
}

static void say_ready(const char *client) {
    printf("{\"ready\": true, \"client\": \"%s\"}\n", client);
    if (fflush(stdout) != 0) fail("nobody reads what is said");
}

static void await_word(void) {
    char line[256];
    if (fgets(line, sizeof line, stdin) == NULL) fail("no word to go");
}

void ready(const char *client) {
    say_ready(client);
    await_word();
}

void await_end(void) {
    char line[256];
    if (fgets(line, sizeof line, stdin) == NULL) return; /* as good as a line */
}

struct begun begin(void) { return (struct begun){.ns = now_ns(), .cpu_s = cpu_s()}; }

/* Prints ONE line; the members before are the caller's. */
static void say_end(struct begun begun) {
    printf("\"cpu_s\": %.6f}\n", cpu_s() - begun.cpu_s);
    if (fflush(stdout) != 0) fail("nobody reads what is said");
}

static void say_span(int64_t begun_ns, int64_t ended_ns) {
    printf("\"begun_ns\": %lld, \"ended_ns\": %lld, ", (long long)begun_ns, (long long)ended_ns);
}

bool is_middle(const struct work *work, uint64_t sent) {
    return strcmp(work->role, "fill") == 0 && sent == work->count / 2;
}

struct middle pause_in_the_middle(uint64_t sent) {
    const struct timespec half = {.tv_nsec = 25000000};
    struct timespec now;
    nanosleep(&half, NULL);
    clock_gettime(CLOCK_REALTIME, &now);
    nanosleep(&half, NULL);
    return (struct middle){.number = sent, .time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec};
}

void say_filled(struct begun begun, uint64_t confirmed, struct middle middle) {
    printf("{\"confirmed\": %llu, \"middle\": %llu, \"middle_ns\": %lld, ", (unsigned long long)confirmed,
           (unsigned long long)middle.number, (long long)middle.time_ns);
    say_span(begun.ns, now_ns());
    say_end(begun);
}

void say_published(struct begun begun, uint64_t confirmed) {
    printf("{\"confirmed\": %llu, ", (unsigned long long)confirmed);
    say_span(begun.ns, now_ns());
    say_end(begun);
}

void say_paced(struct begun begun) {
    putchar('{');
    say_span(begun.ns, now_ns());
    say_end(begun);
}

void say_responded(struct begun begun) {
    putchar('{');
    say_end(begun);
}

/* --- what is sent ------------------------------------------------------------------------- */

char *new_body(const struct work *work) { return memset(must(malloc(work->size)), 'x', work->size); }

void stamp(char *body, int producer, uint64_t index) {
    uint64_t number = (uint64_t)producer << INDEX_BITS | index;
    memcpy(body, &number, sizeof number); /* little-endian, as this machine is */
}

void stamp_with_time(char *body, int producer, uint64_t index) {
    stamp(body, producer, index);
    int64_t now = now_ns();
    memcpy(body + 8, &now, sizeof now);
}

static char *joined(const char *format, ...) {
    va_list values;
    char *text;
    va_start(values, format);
    if (vasprintf(&text, format, values) < 0) fail("out of memory");
    va_end(values);
    return text;
}

char **subject_names(const struct work *work, const char *separator, const char *tail) {
    char **names = must(calloc((size_t)work->subjects, sizeof *names));
    for (int k = 0; k < work->subjects; k++)
        names[k] = work->subjects == 1 && work->rare == 0
                       ? joined("%s", work->subject)
                       : joined("%s%s%d%s%s", work->subject, separator, k, separator, tail);
    return names;
}

char *rare_name(const struct work *work, const char *separator) {
    return joined("%s%srare", work->subject, separator);
}

/* The finaliser of Steele, Lea and Flood's SplitMix: far apart for neighbours, the same in all drivers. */
static uint64_t splitmix64(uint64_t value) {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

bool is_rare(const struct work *work, uint64_t index) {
    if (work->rare == 0) return false;
    return splitmix64(work->seed + index / work->rare) % work->rare == index % work->rare;
}

void await_turn(const struct work *work, int64_t begun_ns, uint64_t index) {
    int64_t due = begun_ns + (int64_t)((double)index * 1e9 / work->rate);
    struct timespec at = {.tv_sec = due / 1000000000, .tv_nsec = due % 1000000000};
    if (now_ns() < due)
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) continue;
}

/* --- what is received --------------------------------------------------------------------- */

struct ledger *new_ledgers(const struct work *work, int number) {
    struct ledger *ledgers = must(calloc((size_t)number, sizeof *ledgers));
    bool rare = strcmp(work->choice, "rare") == 0;
    uint64_t wanted = work->count - work->first;
    if (rare) {
        wanted = 0;
        for (uint64_t i = 0; i < work->count; i++) wanted += is_rare(work, i);
        if (wanted == 0) fail("no record of %llu is rare", (unsigned long long)work->count);
    }
    for (int k = 0; k < number; k++) {
        struct ledger *ledger = &ledgers[k];
        ledger->work = work;
        ledger->rare = rare;
        ledger->expected = wanted * (uint64_t)work->producers;
        ledger->first = work->first;
        ledger->range = work->count - work->first;
        ledger->next = must(calloc((size_t)(work->producers * work->subjects), sizeof *ledger->next));
        uint64_t bits = ledger->range * (uint64_t)work->producers;
        ledger->seen = must(calloc(bits / 64 + 1, sizeof *ledger->seen));
    }
    return ledgers;
}

struct ledger *new_listener(const struct work *work) {
    if (work->size < 16) fail("a record of %zu bytes has no room for its time", work->size);
    struct ledger *listener = new_ledgers(work, 1);
    listener->took_ns = must(calloc(listener->expected, sizeof *listener->took_ns));
    return listener;
}

bool complete(const struct ledger *ledger) { return ledger->received == ledger->expected; }

void take(struct ledger *ledger, const char *body, size_t size) {
    const struct work *work = ledger->work;
    if (size != work->size) fail("a record of %zu bytes, not %zu", size, work->size);
    uint64_t number, index, producer;
    memcpy(&number, body, sizeof number);
    producer = number >> INDEX_BITS;
    index = number & ((1ull << INDEX_BITS) - 1);
    if (producer >= (uint64_t)work->producers || index - ledger->first >= ledger->range)
        fail("record %llu of producer %llu was not asked for", (unsigned long long)index, (unsigned long long)producer);
    if (ledger->rare && !is_rare(work, index))
        fail("record %llu is not rare", (unsigned long long)index);
    uint64_t place = producer * ledger->range + (index - ledger->first);
    uint64_t *word = &ledger->seen[place / 64], bit = 1ull << place % 64;
    if (*word & bit) {
        ledger->duplicates++;
        return;
    }
    *word |= bit;
    uint64_t *next = &ledger->next[producer * (uint64_t)work->subjects + index % (uint64_t)work->subjects];
    if (index < *next)
        ledger->misordered++;
    else
        *next = index + 1;
    if (ledger->took_ns != NULL) {
        int64_t sent;
        memcpy(&sent, body + 8, sizeof sent);
        ledger->took_ns[ledger->received] = now_ns() - sent;
    }
    if (ledger->received++ == 0) ledger->begun_ns = now_ns();
    if (complete(ledger)) ledger->ended_ns = now_ns();
}

static void watch(int poller, int descriptor, int name) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = name};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, descriptor, &event) != 0) fail("epoll: %s", strerror(errno));
}

static int new_poller(int number, const int *descriptors) {
    int poller = epoll_create1(0);
    if (poller < 0) fail("no epoll: %s", strerror(errno));
    for (int k = 0; k < number; k++) watch(poller, descriptors[k], k);
    return poller;
}

static int poll_for(int poller, struct epoll_event *events, int wait_ms) {
    int some = epoll_wait(poller, events, EVENTS, wait_ms);
    if (some < 0 && errno != EINTR) fail("epoll: %s", strerror(errno));
    return some;
}

void receive(const struct ledger *ledgers, int number, const int *descriptors, void (*readable)(int k)) {
    int poller = new_poller(number, descriptors);
    struct epoll_event events[EVENTS];
    int64_t heard_ns = now_ns();
    for (int left = number; left > 0;) {
        int some = poll_for(poller, events, 100);
        bool heard = false;
        for (int e = 0; e < some; e++) {
            int k = events[e].data.fd;
            uint64_t before = ledgers[k].received;
            bool was_complete = complete(&ledgers[k]);
            readable(k);
            heard |= ledgers[k].received != before;
            left -= !was_complete && complete(&ledgers[k]);
        }
        if (heard)
            heard_ns = now_ns();
        else if ((double)(now_ns() - heard_ns) / 1e9 > ledgers->work->idle_s)
            return;
    }
}

void serve(const char *client, int number, const int *descriptors, void (*readable)(int k)) {
    int poller = new_poller(number, descriptors);
    watch(poller, STDIN_FILENO, number);
    struct epoll_event events[EVENTS];
    say_ready(client);
    for (;;) {
        int some = poll_for(poller, events, -1);
        for (int e = 0; e < some; e++) {
            if (events[e].data.fd == number) {
                await_word();
                return;
            }
            readable(events[e].data.fd);
        }
    }
}

static int ascending(const void *a, const void *b) {
    int64_t left = *(const int64_t *)a, right = *(const int64_t *)b;
    return (left > right) - (left < right);
}

static void say_quantiles(int64_t *took_ns, uint64_t number) {
    qsort(took_ns, number, sizeof *took_ns, ascending);
    printf("\"p50_us\": %.3f, \"p99_us\": %.3f, \"p999_us\": %.3f, ", (double)took_ns[number / 2] / 1e3,
           (double)took_ns[number * 99 / 100] / 1e3, (double)took_ns[number * 999 / 1000] / 1e3);
}

void say_received(const struct ledger *ledgers, int number, struct begun begun) {
    uint64_t received = 0, missing = 0, duplicates = 0, misordered = 0;
    int64_t first_ns = INT64_MAX, last_ns = 0;
    for (int k = 0; k < number; k++) {
        const struct ledger *ledger = &ledgers[k];
        received += ledger->received;
        missing += ledger->expected - ledger->received;
        duplicates += ledger->duplicates;
        misordered += ledger->misordered;
        if (ledger->received > 0 && ledger->begun_ns < first_ns) first_ns = ledger->begun_ns;
        int64_t ended_ns = complete(ledger) ? ledger->ended_ns : now_ns();
        if (ended_ns > last_ns) last_ns = ended_ns;
    }
    if (received == 0) fail("nothing arrived in %.0f s", ledgers->work->idle_s);
    printf("{\"received\": %llu, \"missing\": %llu, \"duplicates\": %llu, \"misordered\": %llu, ",
           (unsigned long long)received, (unsigned long long)missing, (unsigned long long)duplicates,
           (unsigned long long)misordered);
    say_span(first_ns, last_ns);
    say_end(begun);
}

void say_published_alone(struct begun begun, uint64_t confirmed, int64_t *took_ns) {
    printf("{\"confirmed\": %llu, ", (unsigned long long)confirmed);
    say_span(begun.ns, now_ns());
    say_quantiles(took_ns, confirmed);
    say_end(begun);
}

void say_heard(struct ledger *ledger, struct begun begun) {
    if (!complete(ledger) || ledger->duplicates > 0 || ledger->misordered > 0)
        fail("%llu of %llu records arrived, %llu twice, %llu out of order", (unsigned long long)ledger->received,
             (unsigned long long)ledger->expected, (unsigned long long)ledger->duplicates,
             (unsigned long long)ledger->misordered);
    printf("{\"received\": %llu, ", (unsigned long long)ledger->received);
    say_quantiles(ledger->took_ns, ledger->received);
    say_end(begun);
}

/* --- requests ----------------------------------------------------------------------------- */

struct requests new_requests(const struct work *work) {
    return (struct requests){
        .work = work, .body = new_body(work), .sent_ns = must(calloc(work->count, sizeof(int64_t)))};
}

const char *next_request(struct requests *requests) {
    if (requests->work->paced) {
        if (requests->sent == 0) requests->begun_ns = now_ns();
        await_turn(requests->work, requests->begun_ns, requests->sent);
    }
    stamp(requests->body, requests->work->producer, requests->sent);
    requests->sent_ns[requests->sent++] = now_ns();
    return requests->body;
}

void take_reply(struct requests *requests, const char *reply, size_t size) {
    const struct work *work = requests->work;
    uint64_t number = 0;
    if (size == work->size + ECHO_SIZE) memcpy(&number, reply + ECHO_SIZE, sizeof number);
    uint64_t index = number & ((1ull << INDEX_BITS) - 1);
    if (index >= requests->sent) fail("a reply to request %llu, which was not sent", (unsigned long long)index);
    /* Only what was asked next may have changed in the body since; stamp it back to compare. */
    stamp(requests->body, work->producer, index);
    if (size != work->size + ECHO_SIZE || memcmp(reply, ECHO, ECHO_SIZE) != 0 ||
        memcmp(reply + ECHO_SIZE, requests->body, work->size) != 0)
        fail("a reply of %zu bytes is not that of its request", size);
    int64_t *sent_ns = &requests->sent_ns[index];
    if (*sent_ns < 0) fail("request %llu was answered twice", (unsigned long long)index);
    *sent_ns -= now_ns(); /* how long it took, negative: that it is answered */
    requests->answered++;
}

void say_answered(const struct requests *requests, struct begun begun) {
    int64_t ended_ns = now_ns();
    if (requests->answered != requests->work->count) fail("not every request was answered");
    for (uint64_t i = 0; i < requests->answered; i++) requests->sent_ns[i] = -requests->sent_ns[i];
    putchar('{');
    say_span(begun.ns, ended_ns);
    say_quantiles(requests->sent_ns, requests->answered);
    say_end(begun);
}
