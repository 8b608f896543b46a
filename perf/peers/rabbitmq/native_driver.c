/* The AMQP 0.9.1 driver: plays the roles of perf/ against RabbitMQ with librabbitmq.
 *
 * Modes: classic (transient queues: no confirms, no acknowledgements), quorum (publisher confirms
 * within a window, consumers acknowledge many at once), stream (stream queues, the same confirms;
 * RabbitMQ's own stream protocol has no client in C). A fanout exchange of the subject's name
 * spreads to one queue a subscriber, a topic exchange when there are many subjects; a stream is
 * one queue that every subscriber reads. Requests go through a classic queue, replies come
 * straight back (amq.rabbitmq.reply-to).
 */
#define _GNU_SOURCE
#include <amqp.h>
#include <amqp_tcp_socket.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

#define PORT 5672
#define CLIENT "librabbitmq " AMQP_VERSION_STRING
#define CHANNEL 1
#define FRAME_MAX 131072
/* Deliveries that may wait for their acknowledgement, and how many one acknowledgement covers. */
#define PREFETCH 2000
#define ACK_EVERY 500
/* A tenth of a second apart. */
#define QUEUE_TRIES 300

static struct work work;
static enum { CLASSIC, QUORUM, STREAM } mode;

static amqp_bytes_t text(const char *characters) { return amqp_cstring_bytes(characters); }

static void check(int status) {
    if (status != AMQP_STATUS_OK) fail("%s", amqp_error_string2(status));
}

/* Ends the program unless the last call of the connection was answered as it should. */
static void check_reply(amqp_rpc_reply_t reply) {
    if (reply.reply_type == AMQP_RESPONSE_NORMAL) return;
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION) fail("%s", amqp_error_string2(reply.library_error));
    if (reply.reply.id == AMQP_CHANNEL_CLOSE_METHOD) {
        const amqp_channel_close_t *closed = reply.reply.decoded;
        fail("%.*s", (int)closed->reply_text.len, (const char *)closed->reply_text.bytes);
    }
    fail("the server closed the connection: %s", amqp_method_name(reply.reply.id));
}

static void check_call(amqp_connection_state_t link) { check_reply(amqp_get_rpc_reply(link)); }

static amqp_connection_state_t connect_to_server(void) {
    amqp_connection_state_t link = amqp_new_connection();
    amqp_socket_t *socket = link == NULL ? NULL : amqp_tcp_socket_new(link);
    if (socket == NULL) fail("out of memory");
    check(amqp_socket_open(socket, work.host, work.port));
    check_reply(amqp_login(link, "/", 0, FRAME_MAX, 0, AMQP_SASL_METHOD_PLAIN, "guest", "guest"));
    amqp_channel_open(link, CHANNEL);
    check_call(link);
    return link;
}

/* --- exchanges and queues: made by whoever comes first, removed by the consumer --------------- */

static void declare_exchange(amqp_connection_state_t link) {
    const char *kind = work.subjects > 1 ? "topic" : "fanout";
    amqp_exchange_declare(link, CHANNEL, text(work.subject), text(kind), 0, mode != CLASSIC, 0, 0, amqp_empty_table);
    check_call(link);
}

static void declare_queue(amqp_connection_state_t link, const char *name) {
    static const char *const kinds[] = {"classic", "quorum", "stream"};
    amqp_table_entry_t kind = {
        .key = text("x-queue-type"),
        .value = {.kind = AMQP_FIELD_KIND_UTF8, .value = {.bytes = text(kinds[mode])}},
    };
    amqp_table_t arguments = {.num_entries = 1, .entries = &kind};
    amqp_queue_declare(link, CHANNEL, text(name), 0, mode != CLASSIC, 0, 0, arguments);
    check_call(link);
}

static void bind_queue(amqp_connection_state_t link, const char *name, const char *pattern) {
    amqp_queue_bind(link, CHANNEL, text(name), text(work.subject), text(pattern), amqp_empty_table);
    check_call(link);
}

/* The queue of subscriber k; a stream has one for all. */
static char *queue_of(int k) {
    char *name;
    int printed = mode == STREAM ? asprintf(&name, "%s", work.subject) : asprintf(&name, "%s.%d", work.subject, k);
    if (printed < 0) fail("out of memory");
    return name;
}

static void open_queue(amqp_connection_state_t link, const char *name) {
    declare_exchange(link);
    declare_queue(link, name);
    char **patterns = subject_names(&work, ".", "*");
    for (int k = 0; k < work.subjects; k++) bind_queue(link, name, work.subjects > 1 ? patterns[k] : "");
}

static void remove_all(amqp_connection_state_t link) {
    for (int k = 0; k < (mode == STREAM ? 1 : work.subscribers); k++) {
        amqp_queue_delete(link, CHANNEL, text(queue_of(k)), 0, 0);
        check_call(link);
    }
    amqp_exchange_delete(link, CHANNEL, text(work.subject), 0);
    check_call(link);
}

/* --- publish, fill, pace ---------------------------------------------------------------------- */

/* A link whose messages run ahead of their confirms by at most a window; without confirms, freely. */
struct publisher {
    amqp_connection_state_t link;
    amqp_basic_properties_t properties;
    uint64_t sent, confirmed; /* the delivery tags of the last */
    uint64_t *apart;          /* by tag modulo window: confirmed alone, ahead of one before */
};

static struct publisher new_publisher(void) {
    struct publisher publisher = {.link = connect_to_server()};
    declare_exchange(publisher.link);
    publisher.properties._flags = AMQP_BASIC_DELIVERY_MODE_FLAG;
    publisher.properties.delivery_mode = mode == CLASSIC ? AMQP_DELIVERY_NONPERSISTENT : AMQP_DELIVERY_PERSISTENT;
    publisher.apart = calloc((size_t)work.window, sizeof *publisher.apart);
    if (publisher.apart == NULL) fail("out of memory");
    if (mode == STREAM) open_queue(publisher.link, queue_of(0));
    if (mode != CLASSIC) {
        amqp_confirm_select(publisher.link, CHANNEL);
        check_call(publisher.link);
    }
    return publisher;
}

/* Confirms come for one tag or for all up to one, and those of single tags in any order. */
static void note_confirm(struct publisher *publisher, const amqp_basic_ack_t *ack) {
    uint64_t window = (uint64_t)work.window;
    if (ack->delivery_tag > publisher->sent) fail("a confirm of what was not sent");
    if (ack->multiple && ack->delivery_tag > publisher->confirmed) publisher->confirmed = ack->delivery_tag;
    publisher->apart[ack->delivery_tag % window] = ack->delivery_tag;
    while (publisher->apart[(publisher->confirmed + 1) % window] == publisher->confirmed + 1) publisher->confirmed++;
}

static void await_confirms(struct publisher *publisher, uint64_t waiting_max) {
    while (publisher->sent - publisher->confirmed > waiting_max) {
        amqp_frame_t frame;
        check(amqp_simple_wait_frame(publisher->link, &frame));
        if (frame.frame_type != AMQP_FRAME_METHOD || frame.payload.method.id != AMQP_BASIC_ACK_METHOD)
            fail("instead of a confirm came %s", amqp_method_name(frame.payload.method.id));
        note_confirm(publisher, frame.payload.method.decoded);
        amqp_maybe_release_buffers(publisher->link);
    }
}

static void send_one(struct publisher *publisher, const char *subject, const char *body) {
    amqp_bytes_t bytes = {.len = work.size, .bytes = (void *)body};
    check(amqp_basic_publish(publisher->link, CHANNEL, text(work.subject), text(subject), 0, 0,
                             &publisher->properties, bytes));
    publisher->sent++;
}

/* The server reads what is sent on a channel in its order: an answer says that it has read everything. */
static void flush(struct publisher *publisher) {
    if (mode == CLASSIC) declare_exchange(publisher->link);
    else await_confirms(publisher, 0);
}

static void publish(void) {
    struct publisher publisher = new_publisher();
    char **subjects = subject_names(&work, ".", "x"), *rare = rare_name(&work, "."), *body = new_body(&work);
    struct middle middle = {0};
    int64_t *took_ns = work.window == 1 ? calloc(work.count, sizeof *took_ns) : NULL;
    if (work.window == 1 && took_ns == NULL) fail("out of memory");
    ready(CLIENT);
    struct begun begun = begin();
    for (uint64_t i = 0; i < work.count; i++) {
        if (is_middle(&work, i)) {
            flush(&publisher);
            middle = pause_in_the_middle(i);
        }
        stamp(body, work.producer, i);
        if (mode != CLASSIC) await_confirms(&publisher, (uint64_t)work.window - 1);
        int64_t sent_ns = took_ns == NULL ? 0 : now_ns();
        send_one(&publisher, is_rare(&work, i) ? rare : subjects[i % (uint64_t)work.subjects], body);
        if (took_ns != NULL) {
            flush(&publisher);
            took_ns[i] = now_ns() - sent_ns;
        }
    }
    flush(&publisher);
    if (strcmp(work.role, "fill") == 0) say_filled(begun, work.count, middle);
    else if (took_ns != NULL) say_published_alone(begun, work.count, took_ns);
    else say_published(begun, work.count);
    await_end();
}

static void pace(void) {
    struct publisher publisher = new_publisher();
    char *body = new_body(&work);
    ready(CLIENT);
    struct begun begun = begin();
    for (uint64_t i = 0; i < work.count; i++) {
        await_turn(&work, begun.ns, i);
        stamp_with_time(body, work.producer, i);
        if (mode != CLASSIC) await_confirms(&publisher, (uint64_t)work.window - 1);
        send_one(&publisher, work.subject, body);
    }
    flush(&publisher);
    say_paced(begun);
    await_end();
}

/* --- subscribe, replay, listen ---------------------------------------------------------------- */

static amqp_connection_state_t *links;
static struct ledger *ledgers;
static uint64_t *unacknowledged;
static char *rare_subject; /* NULL: whatever its subject */

/* Takes the next message that has been read, if one has; `wait` is how long to wait for it. */
static bool consume(amqp_connection_state_t link, amqp_envelope_t *envelope, const struct timeval *wait) {
    amqp_maybe_release_buffers(link);
    amqp_rpc_reply_t reply = amqp_consume_message(link, envelope, wait, 0);
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION && reply.library_error == AMQP_STATUS_TIMEOUT) return false;
    check_reply(reply);
    return true;
}

static void acknowledge(int k, uint64_t delivery_tag) {
    bool many = strcmp(work.form, "bulk") == 0;
    if (mode == CLASSIC || (many && ++unacknowledged[k] < ACK_EVERY && !complete(&ledgers[k]))) return;
    check(amqp_basic_ack(links[k], CHANNEL, delivery_tag, many));
    unacknowledged[k] = 0;
}

/* The server looks into no stream, and finds a time to the second and the chunk: the rest is passed over here. */
static bool is_wanted(const amqp_envelope_t *envelope) {
    amqp_bytes_t key = envelope->routing_key;
    if (rare_subject != NULL) return key.len == strlen(rare_subject) && memcmp(key.bytes, rare_subject, key.len) == 0;
    uint64_t number;
    if (work.first == 0 || envelope->message.body.len < sizeof number) return true;
    memcpy(&number, envelope->message.body.bytes, sizeof number);
    return number >= work.first;
}

static void read_messages(int k) {
    const struct timeval at_once = {0};
    amqp_envelope_t envelope;
    while (consume(links[k], &envelope, &at_once)) {
        amqp_bytes_t body = envelope.message.body;
        if (is_wanted(&envelope)) take(&ledgers[k], body.bytes, body.len);
        acknowledge(k, envelope.delivery_tag);
        amqp_destroy_envelope(&envelope);
    }
}

static void start_consumer(amqp_connection_state_t link, const char *queue, const char *from) {
    amqp_table_entry_t offset = {.key = text("x-stream-offset")};
    if (strcmp(from, "time") == 0) {
        offset.value.kind = AMQP_FIELD_KIND_TIMESTAMP;
        offset.value.value.u64 = (uint64_t)(work.from_ns / 1000000000);
    } else {
        offset.value.kind = AMQP_FIELD_KIND_UTF8;
        offset.value.value.bytes = text(from);
    }
    amqp_table_t arguments = {.num_entries = mode == STREAM, .entries = &offset};
    if (mode != CLASSIC) {
        amqp_basic_qos(link, CHANNEL, 0, PREFETCH, 0);
        check_call(link);
    }
    amqp_basic_consume(link, CHANNEL, text(queue), amqp_empty_bytes, 0, mode == CLASSIC, 0, arguments);
    check_call(link);
}

static void open_links(int number) {
    links = calloc((size_t)number, sizeof *links);
    unacknowledged = calloc((size_t)number, sizeof *unacknowledged);
    if (links == NULL || unacknowledged == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) {
        links[k] = connect_to_server();
        open_queue(links[k], queue_of(k));
    }
}

static void start_consumers(int number, const char *from) {
    for (int k = 0; k < number; k++) start_consumer(links[k], queue_of(k), from);
}

static void read_links(int number) {
    int *descriptors = calloc((size_t)number, sizeof *descriptors);
    if (descriptors == NULL) fail("out of memory");
    for (int k = 0; k < number; k++) {
        descriptors[k] = amqp_get_sockfd(links[k]);
        read_messages(k); /* what came with the answer to the last call */
    }
    receive(ledgers, number, descriptors, read_messages);
    free(descriptors);
}

static void subscribe(void) {
    ledgers = new_ledgers(&work, work.subscribers);
    open_links(work.subscribers);
    start_consumers(work.subscribers, "first"); /* of a stream that is empty now */
    ready(CLIENT);
    struct begun begun = begin();
    read_links(work.subscribers);
    say_received(ledgers, work.subscribers, begun);
    await_end();
    remove_all(links[0]);
}

static void listen_to_pace(void) {
    ledgers = new_listener(&work);
    open_links(1);
    start_consumers(1, "first");
    ready(CLIENT);
    struct begun begun = begin();
    read_links(1);
    say_heard(ledgers, begun);
    await_end();
    remove_all(links[0]);
}

/* Returns when the queue can be used: a server that was just started greets its clients before it has
 * opened its durable queues, and closes the channel of who asks for one. */
static void await_queue(const char *name) {
    const struct timespec pause = {.tv_nsec = 100000000};
    for (int tries = 0; tries < QUEUE_TRIES; tries++) {
        amqp_connection_state_t link = connect_to_server();
        amqp_queue_declare(link, CHANNEL, text(name), 1, 0, 0, 0, amqp_empty_table);
        amqp_rpc_reply_t reply = amqp_get_rpc_reply(link);
        amqp_destroy_connection(link);
        if (reply.reply_type == AMQP_RESPONSE_NORMAL) return;
        if (reply.reply_type != AMQP_RESPONSE_SERVER_EXCEPTION) check_reply(reply);
        nanosleep(&pause, NULL);
    }
    fail("the queue %s is not there", name);
}

static void replay(void) {
    await_queue(queue_of(0));
    ledgers = new_ledgers(&work, 1);
    if (ledgers->rare) rare_subject = rare_name(&work, ".");
    open_links(1);
    ready(CLIENT);
    struct begun begun = begin();
    start_consumers(1, strcmp(work.choice, "time") == 0 ? "time" : "first");
    read_links(1);
    ledgers->begun_ns = begun.ns; /* the server's search is part of it */
    say_received(ledgers, 1, begun);
    await_end();
}

/* --- requests --------------------------------------------------------------------------------- */

static void send_request(amqp_connection_state_t link, struct requests *requests) {
    amqp_basic_properties_t properties = {
        ._flags = AMQP_BASIC_DELIVERY_MODE_FLAG | AMQP_BASIC_REPLY_TO_FLAG,
        .delivery_mode = AMQP_DELIVERY_NONPERSISTENT,
        .reply_to = text("amq.rabbitmq.reply-to"),
    };
    amqp_bytes_t body = {.len = work.size, .bytes = (void *)next_request(requests)};
    check(amqp_basic_publish(link, CHANNEL, amqp_empty_bytes, text(work.subject), 0, 0, &properties, body));
}

static void request(void) {
    amqp_connection_state_t link = connect_to_server();
    struct requests requests = new_requests(&work);
    amqp_basic_consume(link, CHANNEL, text("amq.rabbitmq.reply-to"), amqp_empty_bytes, 0, 1, 0, amqp_empty_table);
    check_call(link);
    ready(CLIENT);
    struct begun begun = begin();
    while (requests.sent < work.count && requests.sent < (uint64_t)work.flight) send_request(link, &requests);
    while (requests.answered < work.count) {
        amqp_envelope_t envelope;
        consume(link, &envelope, NULL);
        take_reply(&requests, envelope.message.body.bytes, envelope.message.body.len);
        amqp_destroy_envelope(&envelope);
        if (requests.sent < work.count) send_request(link, &requests);
    }
    say_answered(&requests, begun);
    await_end();
}

static void answer(int k) {
    const struct timeval at_once = {0};
    static char *reply;
    static size_t room;
    amqp_envelope_t envelope;
    while (consume(links[k], &envelope, &at_once)) {
        amqp_bytes_t body = envelope.message.body;
        if (room < ECHO_SIZE + body.len) {
            room = ECHO_SIZE + body.len;
            reply = realloc(reply, room);
            if (reply == NULL) fail("out of memory");
            memcpy(reply, ECHO, ECHO_SIZE);
        }
        memcpy(reply + ECHO_SIZE, body.bytes, body.len);
        amqp_bytes_t answered = {.len = ECHO_SIZE + body.len, .bytes = reply};
        check(amqp_basic_publish(links[k], CHANNEL, amqp_empty_bytes, envelope.message.properties.reply_to, 0, 0, NULL,
                                 answered));
        amqp_destroy_envelope(&envelope);
    }
}

static void respond(void) {
    int *descriptors = calloc((size_t)work.workers, sizeof *descriptors);
    links = calloc((size_t)work.workers, sizeof *links);
    if (descriptors == NULL || links == NULL) fail("out of memory");
    for (int k = 0; k < work.workers; k++) {
        links[k] = connect_to_server();
        declare_queue(links[k], work.subject);
        start_consumer(links[k], work.subject, "first");
        descriptors[k] = amqp_get_sockfd(links[k]);
    }
    struct begun begun = begin();
    serve(CLIENT, work.workers, descriptors, answer);
    say_responded(begun);
    await_end();
    amqp_queue_delete(links[0], CHANNEL, text(work.subject), 0, 0);
    check_call(links[0]);
}

int main(int argc, char **argv) {
    work = parse_work(argc, argv, PORT);
    if (strcmp(work.mode, "classic") == 0) mode = CLASSIC;
    else if (strcmp(work.mode, "quorum") == 0) mode = QUORUM;
    else if (strcmp(work.mode, "stream") == 0) mode = STREAM;
    else fail("no mode %s", work.mode);
    if (strcmp(work.role, "publish") == 0) publish();
    else if (strcmp(work.role, "subscribe") == 0) subscribe();
    else if (strcmp(work.role, "pace") == 0) pace();
    else if (strcmp(work.role, "listen") == 0) listen_to_pace();
    else if (mode == CLASSIC && strcmp(work.role, "request") == 0) request();
    else if (mode == CLASSIC && strcmp(work.role, "respond") == 0) respond();
    else if (mode == STREAM && strcmp(work.role, "fill") == 0) publish();
    else if (mode == STREAM && strcmp(work.role, "replay") == 0) replay();
    else fail("no role %s in mode %s", work.role, work.mode);
}
