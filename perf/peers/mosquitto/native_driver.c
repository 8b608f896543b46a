/* The MQTT driver: plays the roles of perf/ with libmosquitto.
 *
 * Its best form: no thread of the library's own, but its loop called when a socket is ready;
 * publishes run ahead of the acknowledgements by a window (qos1), or by what the library has
 * still to write (qos0). Modes: qos0, qos1. Subjects are topics, `/` for `.` and `+` for `*`;
 * a request names its reply's topic in the response-topic of MQTT 5, and workers share a
 * subscription.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <mosquitto.h>
#include <mqtt_protocol.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

#define PORT 1883
#define KEEPALIVE_S 3600
/* Most publishes of qos1 unacknowledged: at each acknowledgement the library walks through all that
 * wait, so that 4,096 are half as fast as 128 (87,000 records/s of 140 bytes against 167,000). */
#define QOS1_WINDOW 128
/* Packets read at most before another link has its turn. */
#define BURST 1000

static struct work work;
static int qos;
static char client[64];

static void check(int status) {
    if (status != MOSQ_ERR_SUCCESS) fail("%s", mosquitto_strerror(status));
}

/* --- links: one at a time is in a callback ------------------------------------------------------- */

struct link {
    struct mosquitto *mosquitto;
    int number;
    bool connected;
    int subscriptions; /* acknowledged so far */
    uint64_t sent, confirmed;
};

static void on_connect(struct mosquitto *mosquitto, void *object, int code) {
    (void)mosquitto;
    struct link *link = object;
    if (code != 0) fail("refused: %s", mosquitto_connack_string(code));
    link->connected = true;
}

static void on_disconnect(struct mosquitto *mosquitto, void *object, int code) {
    (void)mosquitto, (void)object;
    if (code != 0) fail("the link was lost: %s", mosquitto_strerror(code));
}

static void on_subscribe(struct mosquitto *mosquitto, void *object, int id, int number, const int *granted) {
    (void)mosquitto, (void)id;
    struct link *link = object;
    for (int i = 0; i < number; i++)
        if (granted[i] > 2) fail("a subscription was refused");
    link->subscriptions++;
}

static void on_publish(struct mosquitto *mosquitto, void *object, int id) {
    (void)mosquitto, (void)id;
    struct link *link = object;
    link->confirmed++;
}

/* The library reads one packet a call; that there is no more shows in errno alone. */
static void read_burst(struct link *link) {
    for (int i = 0; i < BURST; i++) {
        errno = 0;
        check(mosquitto_loop_read(link->mosquitto, 1));
        if (errno == EAGAIN || errno == EWOULDBLOCK) return;
    }
}

/* Reads what there is and writes what waits; when there is neither, waits for one of them. */
static void turn(struct link *link, int wait_ms) {
    bool writing = mosquitto_want_write(link->mosquitto);
    struct pollfd waiting = {.fd = mosquitto_socket(link->mosquitto), .events = POLLIN | (writing ? POLLOUT : 0)};
    if (poll(&waiting, 1, wait_ms) < 0) fail("poll failed");
    if (waiting.revents & (POLLIN | POLLHUP | POLLERR)) read_burst(link);
    if (waiting.revents & POLLOUT) check(mosquitto_loop_write(link->mosquitto, 1));
}

static void connect_to_server(struct link *link) {
    link->mosquitto = mosquitto_new(NULL, true, link);
    if (link->mosquitto == NULL) fail("out of memory");
    check(mosquitto_int_option(link->mosquitto, MOSQ_OPT_PROTOCOL_VERSION, MQTT_PROTOCOL_V5));
    check(mosquitto_int_option(link->mosquitto, MOSQ_OPT_TCP_NODELAY, 1));
    check(mosquitto_int_option(link->mosquitto, MOSQ_OPT_RECEIVE_MAXIMUM, 65535));
    check(mosquitto_int_option(link->mosquitto, MOSQ_OPT_SEND_MAXIMUM, 65535));
    mosquitto_connect_callback_set(link->mosquitto, on_connect);
    mosquitto_disconnect_callback_set(link->mosquitto, on_disconnect);
    mosquitto_subscribe_callback_set(link->mosquitto, on_subscribe);
    mosquitto_publish_callback_set(link->mosquitto, on_publish);
    check(mosquitto_connect(link->mosquitto, work.host, work.port, KEEPALIVE_S));
    while (!link->connected) turn(link, -1);
}

static char *topic(const char *subject) {
    char *name = strdup(subject);
    if (name == NULL) fail("out of memory");
    for (char *dot = name; (dot = strchr(dot, '.')) != NULL;) *dot = '/';
    return name;
}

static void subscribe_to(struct link *link, const char *pattern) {
    int before = link->subscriptions;
    check(mosquitto_subscribe(link->mosquitto, NULL, pattern, qos));
    while (link->subscriptions == before) turn(link, -1);
}

/* --- publish, pace ----------------------------------------------------------------------------- */

/* qos0 is confirmed when it is written, qos1 when the server says so. */
static void await_confirms(struct link *link, uint64_t waiting_max) {
    while (link->sent - link->confirmed > waiting_max) turn(link, -1);
}

static void send_one(struct link *link, const char *to, const char *body) {
    check(mosquitto_publish(link->mosquitto, NULL, to, (int)work.size, body, qos, false));
    link->sent++;
}

static uint64_t window(void) {
    return work.window < QOS1_WINDOW ? (uint64_t)work.window : QOS1_WINDOW;
}

/* The server answers in order: what was written before the answer has been read. */
static void flush(struct link *link) {
    await_confirms(link, 0);
    if (qos == 0) subscribe_to(link, "perf-round-trip");
}

static void publish(void) {
    struct link link = {0};
    connect_to_server(&link);
    char **topics = subject_names(&work, "/", "x"), *body = new_body(&work);
    for (int k = 0; k < work.subjects; k++) topics[k] = topic(topics[k]);
    ready(client);
    struct begun begun = begin();
    for (uint64_t i = 0; i < work.count; i++) {
        stamp(body, work.producer, i);
        await_confirms(&link, window() - 1);
        send_one(&link, topics[i % (uint64_t)work.subjects], body);
    }
    flush(&link);
    say_published(begun, work.count);
    await_end();
}

static void pace(void) {
    struct link link = {0};
    connect_to_server(&link);
    char *to = topic(work.subject), *body = new_body(&work);
    ready(client);
    struct begun begun = begin();
    for (uint64_t i = 0; i < work.count; i++) {
        await_turn(&work, begun.ns, i);
        stamp_with_time(body, work.producer, i);
        send_one(&link, to, body);
        turn(&link, 0);
        await_confirms(&link, window());
    }
    flush(&link);
    say_paced(begun);
    await_end();
}

/* --- subscribe, listen -------------------------------------------------------------------------- */

static struct link *links;
static struct ledger *ledgers;

static void on_message(struct mosquitto *mosquitto, void *object, const struct mosquitto_message *message) {
    (void)mosquitto;
    const struct link *link = object;
    take(&ledgers[link->number], message->payload, (size_t)message->payloadlen);
}

static void read_link(int k) {
    read_burst(&links[k]);
    /* Acknowledgements that found the socket full. */
    while (mosquitto_want_write(links[k].mosquitto)) turn(&links[k], -1);
}

static struct link *new_links(int number) {
    struct link *made = calloc((size_t)number, sizeof *made);
    if (made == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) {
        made[k].number = k;
        connect_to_server(&made[k]);
    }
    return made;
}

static int *descriptors_of(int number) {
    int *descriptors = calloc((size_t)number, sizeof *descriptors);
    if (descriptors == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) descriptors[k] = mosquitto_socket(links[k].mosquitto);
    return descriptors;
}

static void open_links(int number) {
    char **patterns = subject_names(&work, "/", "+");
    links = new_links(number);
    for (int k = 0; k < number; k++) {
        mosquitto_message_callback_set(links[k].mosquitto, on_message);
        for (int p = 0; p < work.subjects; p++) subscribe_to(&links[k], topic(patterns[p]));
    }
}

static void subscribe(void) {
    ledgers = new_ledgers(&work, work.subscribers);
    open_links(work.subscribers);
    ready(client);
    struct begun begun = begin();
    receive(ledgers, work.subscribers, descriptors_of(work.subscribers), read_link);
    say_received(ledgers, work.subscribers, begun);
    await_end();
}

static void listen_to_pace(void) {
    ledgers = new_listener(&work);
    open_links(1);
    ready(client);
    struct begun begun = begin();
    receive(ledgers, 1, descriptors_of(1), read_link);
    say_heard(ledgers, begun);
    await_end();
}

/* --- requests ----------------------------------------------------------------------------------- */

static struct requests requests;
static mosquitto_property *response_topic;
static char *request_topic;

static void send_request(struct link *link) {
    check(mosquitto_publish_v5(link->mosquitto, NULL, request_topic, (int)work.size, next_request(&requests), qos, false,
                               response_topic));
}

static void on_reply(struct mosquitto *mosquitto, void *object, const struct mosquitto_message *message) {
    (void)mosquitto;
    take_reply(&requests, message->payload, (size_t)message->payloadlen);
    if (requests.sent < work.count) send_request(object);
}

static void request(void) {
    struct link link = {0};
    char inbox[128];
    connect_to_server(&link);
    requests = new_requests(&work);
    request_topic = topic(work.subject);
    snprintf(inbox, sizeof inbox, "inbox/%lld", (long long)now_ns());
    check(mosquitto_property_add_string(&response_topic, MQTT_PROP_RESPONSE_TOPIC, inbox));
    mosquitto_message_callback_set(link.mosquitto, on_reply);
    subscribe_to(&link, inbox);
    ready(client);
    struct begun begun = begin();
    while (requests.sent < work.count && requests.sent < (uint64_t)work.flight) send_request(&link);
    while (requests.answered < work.count) turn(&link, -1);
    say_answered(&requests, begun);
    await_end();
}

static void on_request(struct mosquitto *mosquitto, void *object, const struct mosquitto_message *message,
                       const mosquitto_property *properties) {
    (void)object;
    static char *reply;
    static size_t room;
    char *inbox = NULL;
    size_t size = (size_t)message->payloadlen;
    if (mosquitto_property_read_string(properties, MQTT_PROP_RESPONSE_TOPIC, &inbox, false) == NULL)
        fail("a request without a response topic");
    if (room < ECHO_SIZE + size) {
        room = ECHO_SIZE + size;
        reply = realloc(reply, room);
        if (reply == NULL) fail("out of memory");
        memcpy(reply, ECHO, ECHO_SIZE);
    }
    memcpy(reply + ECHO_SIZE, message->payload, size);
    check(mosquitto_publish(mosquitto, NULL, inbox, (int)(ECHO_SIZE + size), reply, qos, false));
    free(inbox);
}

static void respond(void) {
    char *shared;
    links = new_links(work.workers);
    if (asprintf(&shared, "$share/workers/%s", topic(work.subject)) < 0) fail("out of memory");
    for (int k = 0; k < work.workers; k++) {
        mosquitto_message_v5_callback_set(links[k].mosquitto, on_request);
        subscribe_to(&links[k], shared);
    }
    struct begun begun = begin();
    serve(client, work.workers, descriptors_of(work.workers), read_link);
    say_responded(begun);
    await_end();
}

int main(int argc, char **argv) {
    int major, minor, revision;
    work = parse_work(argc, argv, PORT);
    if (strcmp(work.mode, "qos0") == 0) qos = 0;
    else if (strcmp(work.mode, "qos1") == 0) qos = 1;
    else fail("no mode %s", work.mode);
    check(mosquitto_lib_init());
    mosquitto_lib_version(&major, &minor, &revision);
    snprintf(client, sizeof client, "libmosquitto %d.%d.%d", major, minor, revision);
    if (strcmp(work.role, "publish") == 0) publish();
    else if (strcmp(work.role, "subscribe") == 0) subscribe();
    else if (strcmp(work.role, "pace") == 0) pace();
    else if (strcmp(work.role, "listen") == 0) listen_to_pace();
    else if (strcmp(work.role, "request") == 0) request();
    else if (strcmp(work.role, "respond") == 0) respond();
    else fail("no role %s in mode %s", work.role, work.mode);
}
