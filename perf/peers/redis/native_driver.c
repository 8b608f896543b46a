/* The Redis driver: plays the roles of perf/ with hiredis, as Debian packages it.
 *
 * Its best form: commands are pipelined and written by the batch, replies are read behind them
 * within a window, and what arrives is looked at where the parser finds it, through the reply
 * functions that hiredis offers to language bindings, not as objects on the heap.
 * Modes: pubsub (nothing is kept), stream (XADD and XREAD; how often it is synced is the
 * server's configuration). Requests wait in a list, so do their replies, in either mode.
 */
#define _GNU_SOURCE
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define PORT 6379
#define TEXT(value) #value
#define VERSION(major, minor, patch) "hiredis " TEXT(major) "." TEXT(minor) "." TEXT(patch)
#define CLIENT VERSION(HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH)
/* Commands written together, at most half a window. */
#define BATCH 512
/* Records that one XREAD may bring. */
#define READ_COUNT "1000"

static struct work work;
static bool is_stream;

static redisContext *connect_to_server(void) {
    redisContext *link = redisConnect(work.host, work.port);
    if (link == NULL) fail("out of memory");
    if (link->err) fail("%s", link->errstr);
    redisEnableKeepAlive(link);
    return link;
}

static void check(redisContext *link, int status) {
    if (status != REDIS_OK) fail("%s", link->err ? link->errstr : "the link is unusable");
}

/* Runs one command by itself; for what is not measured. */
static void run(redisContext *link, const char *format, const char *name) {
    redisReply *reply = redisCommand(link, format, name);
    if (reply == NULL) fail("%s", link->errstr);
    if (reply->type == REDIS_REPLY_ERROR) fail("%s", reply->str);
    freeReplyObject(reply);
}

/* --- replies that are only counted, and bodies looked at in place ---------------------------- */

static void *const SEEN = (void *)1; /* what every reply object is: nothing is kept */

static void *see_array(const redisReadTask *task, int elements) {
    (void)task, (void)elements;
    return SEEN;
}

static void *see_integer(const redisReadTask *task, long long value) {
    (void)task, (void)value;
    return SEEN;
}

static void *see_nil(const redisReadTask *task) {
    (void)task;
    return SEEN;
}

static void forget(void *object) { (void)object; }

static void *see_string(const redisReadTask *task, char *text, size_t size) {
    if (task->type == REDIS_REPLY_ERROR) fail("%.*s", (int)size, text);
    return SEEN;
}

static int depth(const redisReadTask *task) {
    int above = 0;
    while ((task = task->parent) != NULL) above++;
    return above;
}

static struct ledger *taking; /* of the link that is being read */
static char *rare_subject, *kept_body; /* for a replay of the rare subject */

/* ["message", channel, body], or with the pattern before the channel. */
static void *see_message(const redisReadTask *task, char *text, size_t size) {
    see_string(task, text, size);
    if (task->parent != NULL && task->idx == task->parent->elements - 1) take(taking, text, size);
    return SEEN;
}

static char last_id[64]; /* of the entry that was read last */

/* [[stream, [[id, [field, body]], ...]]], with the subject's field and the subject behind them in a
 * fill with a rare one: no server looks into a stream, whoever wants that subject reads everything. */
static void *see_entry(const redisReadTask *task, char *text, size_t size) {
    see_string(task, text, size);
    int above = depth(task);
    if (above == 4 && task->idx == 0) {
        if (size >= sizeof last_id) fail("an id of %zu bytes", size);
        memcpy(last_id, text, size);
        last_id[size] = '\0';
    } else if (above == 5 && task->idx == 1) {
        if (!taking->rare) take(taking, text, size);
        else memcpy(kept_body, text, size < work.size ? size : work.size);
    } else if (above == 5 && task->idx == 3 && taking->rare) {
        if (size == strlen(rare_subject) && memcmp(text, rare_subject, size) == 0) take(taking, kept_body, work.size);
    }
    return SEEN;
}

static redisReplyObjectFunctions counting = {see_string, see_array, see_integer, see_nil, forget};
static redisReplyObjectFunctions messages = {see_message, see_array, see_integer, see_nil, forget};
static redisReplyObjectFunctions entries = {see_entry, see_array, see_integer, see_nil, forget};

/* Parses what has been read; returns how many replies were whole. */
static int parse(redisContext *link) {
    void *reply;
    int whole = 0;
    for (;;) {
        check(link, redisGetReplyFromReader(link, &reply));
        if (reply == NULL) return whole;
        whole++;
    }
}

static void write_all(redisContext *link) {
    int done = 0;
    while (!done) check(link, redisBufferWrite(link, &done));
}

/* --- publish and fill ----------------------------------------------------------------------- */

/* A command that publishes to one subject, ready but for the body's number. */
struct command {
    char *text;
    int size;
    size_t body; /* where the body is in the text */
};

static struct command command_to(const char *subject, const char *body) {
    struct command command;
    const char *publish[] = {"PUBLISH", subject, body};
    const char *add[] = {"XADD", work.subject, "*", "b", body, "s", subject};
    const char **arguments = is_stream ? add : publish;
    int body_at = is_stream ? 4 : 2;
    int number = is_stream && strcmp(subject, work.subject) != 0 ? 7 : body_at + 1;
    size_t sizes[7];
    for (int i = 0; i < number; i++) sizes[i] = i == body_at ? work.size : strlen(arguments[i]);
    command.size = redisFormatCommandArgv(&command.text, number, arguments, sizes);
    if (command.size < 0) fail("out of memory");
    char *found = memmem(command.text, (size_t)command.size, body, work.size);
    command.body = (size_t)(found - command.text);
    return command;
}

/* A link on which commands run ahead of their replies by at most a window. */
struct pipeline {
    redisContext *link;
    int waiting; /* commands without a reply so far */
    int unwritten;
};

static struct pipeline new_pipeline(void) {
    struct pipeline pipeline = {.link = connect_to_server()};
    pipeline.link->reader->fn = &counting;
    return pipeline;
}

static void settle(struct pipeline *pipeline, int waiting_max) {
    write_all(pipeline->link);
    pipeline->unwritten = 0;
    while (pipeline->waiting > waiting_max) {
        check(pipeline->link, redisBufferRead(pipeline->link));
        pipeline->waiting -= parse(pipeline->link);
    }
}

static void append(struct pipeline *pipeline, const struct command *command, bool silent) {
    check(pipeline->link, redisAppendFormattedCommand(pipeline->link, command->text, (size_t)command->size));
    pipeline->waiting += !silent;
    int batch = work.window < 2 * BATCH ? (work.window + 1) / 2 : BATCH;
    if (++pipeline->unwritten >= batch) settle(pipeline, work.window - batch);
}

/* Nobody reads how many heard a message: the server need not say it. */
static void publish_silently(struct pipeline *pipeline) {
    redisContext *link = pipeline->link;
    check(link, redisAppendCommand(link, "CLIENT REPLY OFF"));
    write_all(link);
}

static void end_silence(struct pipeline *pipeline) {
    write_all(pipeline->link);
    check(pipeline->link, redisAppendCommand(pipeline->link, "CLIENT REPLY ON"));
    pipeline->waiting = 1;
    settle(pipeline, 0);
}

static void publish(void) {
    bool silent = !is_stream && strcmp(work.form, "bulk") == 0;
    struct pipeline pipeline = new_pipeline();
    struct middle middle = {0};
    char **subjects = subject_names(&work, ".", "x");
    char *body = new_body(&work);
    struct command *commands = calloc((size_t)work.subjects, sizeof *commands);
    if (commands == NULL) fail("out of memory");
    for (int k = 0; k < work.subjects; k++) commands[k] = command_to(subjects[k], body);
    struct command rare = command_to(rare_name(&work, "."), body);
    ready(CLIENT);
    struct begun begun = begin();
    if (silent) publish_silently(&pipeline);
    for (uint64_t i = 0; i < work.count; i++) {
        if (is_middle(&work, i)) {
            settle(&pipeline, 0);
            middle = pause_in_the_middle(i);
        }
        struct command *command = is_rare(&work, i) ? &rare : &commands[i % (uint64_t)work.subjects];
        stamp(command->text + command->body, work.producer, i);
        append(&pipeline, command, silent);
    }
    if (silent) end_silence(&pipeline);
    settle(&pipeline, 0);
    if (strcmp(work.role, "fill") == 0) say_filled(begun, work.count, middle);
    else say_published(begun, work.count);
    await_end();
}

static void pace(void) {
    struct pipeline pipeline = new_pipeline();
    struct command command = command_to(work.subject, new_body(&work));
    ready(CLIENT);
    struct begun begun = begin();
    for (uint64_t i = 0; i < work.count; i++) {
        await_turn(&work, begun.ns, i);
        stamp_with_time(command.text + command.body, work.producer, i);
        append(&pipeline, &command, false);
        settle(&pipeline, work.window);
    }
    settle(&pipeline, 0);
    say_paced(begun);
    await_end();
}

/* --- subscribe, replay, listen -------------------------------------------------------------- */

static redisContext **links;
static struct ledger *ledgers;
static char (*positions)[sizeof last_id]; /* of each link: the id that it has read up to */

static void ask_on(int k) {
    const char *format = "XREAD COUNT " READ_COUNT " BLOCK 0 STREAMS %s %s";
    if (redisAppendCommand(links[k], format, work.subject, positions[k]) != REDIS_OK) fail("%s", links[k]->errstr);
    write_all(links[k]);
}

static void read_messages(int k) {
    taking = &ledgers[k];
    check(links[k], redisBufferRead(links[k]));
    parse(links[k]);
}

static void read_entries(int k) {
    taking = &ledgers[k];
    check(links[k], redisBufferRead(links[k]));
    memcpy(last_id, positions[k], sizeof last_id);
    int whole = parse(links[k]);
    memcpy(positions[k], last_id, sizeof last_id);
    if (whole > 0 && !complete(taking)) ask_on(k);
}

/* Opens `number` links that read from the position `from` on, or from now on when they are subscribers of channels. */
static void open_links(int number, const char *from) {
    char **patterns = subject_names(&work, ".", "*");
    links = calloc((size_t)number, sizeof *links);
    positions = calloc((size_t)number, sizeof *positions);
    if (links == NULL || positions == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) {
        links[k] = connect_to_server();
        strcpy(positions[k], from);
        for (int p = 0; !is_stream && p < work.subjects; p++)
            run(links[k], work.subjects == 1 ? "SUBSCRIBE %s" : "PSUBSCRIBE %s", patterns[p]);
        links[k]->reader->fn = is_stream ? &entries : &messages;
    }
}

/* Reads until everything is there; whatever is in the stream when nothing is asked for yet waits there. */
static void read_links(int number) {
    int *descriptors = calloc((size_t)number, sizeof *descriptors);
    if (descriptors == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) {
        descriptors[k] = links[k]->fd;
        if (is_stream) ask_on(k);
    }
    receive(ledgers, number, descriptors, is_stream ? read_entries : read_messages);
    free(descriptors);
}

static void remove_stream(void) {
    if (is_stream) run(connect_to_server(), "DEL %s", work.subject);
}

static void subscribe(void) {
    ledgers = new_ledgers(&work, work.subscribers);
    open_links(work.subscribers, "0");
    ready(CLIENT);
    struct begun begun = begin();
    read_links(work.subscribers);
    say_received(ledgers, work.subscribers, begun);
    await_end();
    remove_stream();
}

static void listen_to_pace(void) {
    ledgers = new_listener(&work);
    open_links(1, "0");
    ready(CLIENT);
    struct begun begun = begin();
    read_links(1);
    say_heard(ledgers, begun);
    await_end();
    remove_stream();
}

static void replay(void) {
    char from[sizeof last_id] = "0";
    /* An id begins with the server's clock in ms; XREAD gives what is behind an id. */
    if (strcmp(work.choice, "time") == 0)
        snprintf(from, sizeof from, "%lld-0", (long long)(work.from_ns / 1000000));
    ledgers = new_ledgers(&work, 1);
    rare_subject = rare_name(&work, ".");
    kept_body = new_body(&work);
    open_links(1, from);
    ready(CLIENT);
    struct begun begun = begin();
    read_links(1);
    ledgers->begun_ns = begun.ns; /* the server's search is part of it */
    say_received(ledgers, 1, begun);
    await_end();
}

/* --- requests ------------------------------------------------------------------------------- */

/* A request is `<inbox> <body>` in the list of its subject, its reply `re:<body>` in the list inbox. */

static struct requests requests;

/* [list, [reply, ...]] */
static void *see_reply(const redisReadTask *task, char *text, size_t size) {
    see_string(task, text, size);
    if (depth(task) == 2) take_reply(&requests, text, size);
    return SEEN;
}

static redisReplyObjectFunctions replies = {see_reply, see_array, see_integer, see_nil, forget};

static void await_list(redisContext *link, const char *list, int most) {
    check(link, redisAppendCommand(link, "BLMPOP 0 1 %s LEFT COUNT %d", list, most));
}

/* The arguments of the RPUSH that carries a request, and where its body is. */
struct push {
    const char *arguments[3];
    size_t sizes[3];
    char *body;
};

static struct push new_push(const char *inbox) {
    size_t head = strlen(inbox) + 1; /* the inbox and a space before the body */
    char *value = malloc(head + work.size);
    if (value == NULL) fail("out of memory");
    memcpy(value, inbox, head - 1);
    value[head - 1] = ' ';
    return (struct push){
        {"RPUSH", work.subject, value}, {strlen("RPUSH"), strlen(work.subject), head + work.size}, value + head};
}

/* Pushes as many requests as may be in flight, a command each, as callers do who know nothing of each
 * other; returns how many. */
static int push_requests(redisContext *link, struct push *push) {
    int commands = 0;
    for (; requests.sent < work.count && requests.sent - requests.answered < (uint64_t)work.flight; commands++) {
        memcpy(push->body, next_request(&requests), work.size);
        check(link, redisAppendCommandArgv(link, 3, push->arguments, push->sizes));
    }
    return commands;
}

static void request(void) {
    redisContext *link = connect_to_server();
    char inbox[128];
    snprintf(inbox, sizeof inbox, "%s:%lld", work.subject, (long long)now_ns());
    struct push push = new_push(inbox);
    requests = new_requests(&work);
    link->reader->fn = &replies;
    ready(CLIENT);
    struct begun begun = begin();
    while (requests.answered < work.count) {
        int waiting = push_requests(link, &push) + 1;
        await_list(link, inbox, work.flight);
        for (write_all(link); waiting > 0; waiting -= parse(link)) check(link, redisBufferRead(link));
    }
    say_answered(&requests, begun);
    await_end();
    run(connect_to_server(), "UNLINK %s", inbox);
}

static redisContext *answering; /* the link whose requests are being read */

static void *see_request(const redisReadTask *task, char *text, size_t size) {
    see_string(task, text, size);
    if (depth(task) != 2) return SEEN;
    const char *space = memchr(text, ' ', size);
    if (space == NULL) fail("a request of %zu bytes without an inbox", size);
    size_t head = (size_t)(space - text), body = size - head - 1;
    static char *reply;
    static size_t room;
    if (room < ECHO_SIZE + body) {
        room = ECHO_SIZE + body;
        reply = realloc(reply, room);
        if (reply == NULL) fail("out of memory");
        memcpy(reply, ECHO, ECHO_SIZE);
    }
    memcpy(reply + ECHO_SIZE, space + 1, body);
    const char *arguments[] = {"RPUSH", text, reply};
    size_t sizes[] = {5, head, ECHO_SIZE + body};
    check(answering, redisAppendCommandArgv(answering, 3, arguments, sizes));
    return SEEN;
}

static void *const REQUESTS = (void *)2; /* the reply to a BLMPOP, once it is whole */

static void *see_requests(const redisReadTask *task, int elements) {
    see_array(task, elements);
    return task->parent == NULL ? REQUESTS : SEEN;
}

static redisReplyObjectFunctions questions = {see_request, see_requests, see_integer, see_nil, forget};

/* One of several workers leaves some requests to the others. */
static void await_requests(redisContext *link) {
    int share = work.flight / work.workers;
    await_list(link, work.subject, work.workers == 1 ? 256 : share > 1 ? share : 1);
    write_all(link);
}

/* The replies go out with the next BLMPOP, when all requests of the last have been read: behind a
 * BLMPOP that waits they would wait, too. */
static void answer(int k) {
    void *reply = SEEN;
    bool whole = false;
    answering = links[k];
    check(answering, redisBufferRead(answering));
    while (reply != NULL) {
        check(answering, redisGetReplyFromReader(answering, &reply));
        whole |= reply == REQUESTS;
    }
    if (whole) await_requests(answering);
}

static void respond(void) {
    int *descriptors = calloc((size_t)work.workers, sizeof *descriptors);
    links = calloc((size_t)work.workers, sizeof *links);
    if (descriptors == NULL || links == NULL) fail("out of memory");
    for (int k = 0; k < work.workers; k++) {
        links[k] = connect_to_server();
        links[k]->reader->fn = &questions;
        descriptors[k] = links[k]->fd;
        await_requests(links[k]);
    }
    struct begun begun = begin();
    serve(CLIENT, work.workers, descriptors, answer);
    say_responded(begun);
    await_end();
}

int main(int argc, char **argv) {
    work = parse_work(argc, argv, PORT);
    is_stream = strcmp(work.mode, "stream") == 0 || strcmp(work.mode, "stream-sync") == 0;
    if (!is_stream && strcmp(work.mode, "pubsub") != 0) fail("no mode %s", work.mode);
    if (strcmp(work.role, "publish") == 0) publish();
    else if (strcmp(work.role, "subscribe") == 0) subscribe();
    else if (strcmp(work.role, "pace") == 0) pace();
    else if (strcmp(work.role, "listen") == 0) listen_to_pace();
    else if (strcmp(work.role, "request") == 0) request();
    else if (strcmp(work.role, "respond") == 0) respond();
    else if (is_stream && strcmp(work.role, "fill") == 0) publish();
    else if (is_stream && strcmp(work.role, "replay") == 0) replay();
    else fail("no role %s in mode %s", work.role, work.mode);
}
