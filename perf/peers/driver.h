/* What every C driver shares: the driver protocol, the bodies, and their verification.
 *
 * A driver is one program that plays one role against one peer. What is asked arrives as
 * key=value arguments, what is found leaves as lines of JSON, and a line on stdin says when
 * to go on. The rule: a figure is either measured or not printed; fail() ends the program.
 */
#ifndef PERF_NATIVE_DRIVER_H
#define PERF_NATIVE_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* --- what is asked ------------------------------------------------------------------------ */

struct work {
    const char *role, *mode, *subject, *form, *choice;
    const char *host;
    int port;
    size_t size;
    uint64_t count, seed, rare;
    uint64_t first; /* by time: the number of the first record that must come */
    int64_t from_ns; /* by time: CLOCK_REALTIME from which on records are wanted */
    int window, producer, producers, subscribers, flight, workers, subjects;
    double rate, idle_s;
    bool paced; /* requests are made at `rate`, each when it is due and the one before is answered */
};

/* Fills `work` from key=value arguments; unknown keys are left aside: other drivers know them. */
struct work parse_work(int argc, char **argv, int default_port);

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --- the course of a role ----------------------------------------------------------------- */

/* Says that everything is connected and subscribed, and waits for the word to go. */
void ready(const char *client);

/* For respond: says so, and calls readable(k) whenever descriptors[k] can be read until the word comes. */
void serve(const char *client, int number, const int *descriptors, void (*readable)(int k));

/* Stays until nobody needs this process any more. */
void await_end(void);

struct begun {
    int64_t ns;
    double cpu_s;
};

struct begun begin(void);
int64_t now_ns(void);

/* Where a fill paused for a replay from a time on: everything before it is confirmed. */
struct middle {
    uint64_t number; /* of the first record after it */
    int64_t time_ns; /* CLOCK_REALTIME within it */
};

bool is_middle(const struct work *work, uint64_t sent);
struct middle pause_in_the_middle(uint64_t sent);

/* The results of publish, of fill, of pace and of respond. */
void say_published(struct begun begun, uint64_t confirmed);
/* The same of one record after the other, with how long each waited for its confirm. */
void say_published_alone(struct begun begun, uint64_t confirmed, int64_t *took_ns);
void say_filled(struct begun begun, uint64_t confirmed, struct middle middle);
void say_paced(struct begun begun);
void say_responded(struct begun begun);

/* --- what is sent ------------------------------------------------------------------------- */

/* A record before stamp() has said which; the caller's to free. */
char *new_body(const struct work *work);
void stamp(char *body, int producer, uint64_t index);
/* The same with the time of sending in the next eight bytes. */
void stamp_with_time(char *body, int producer, uint64_t index);

/* Names `<subject><separator>k<separator><tail>`, one for each of work->subjects: with the tail "x" where
 * record k goes, with a wildcard a pattern for it. Of one subject it is the bare name. */
char **subject_names(const struct work *work, const char *separator, const char *tail);

/* The name of the rare subject. */
char *rare_name(const struct work *work, const char *separator);

/* Whether record `index` of a fill goes to the rare subject: one in each block of work->rare. */
bool is_rare(const struct work *work, uint64_t index);

/* Sleeps until record `index` is due, work->rate of them a second from begun_ns on. */
void await_turn(const struct work *work, int64_t begun_ns, uint64_t index);

/* --- what is received --------------------------------------------------------------------- */

/* Judges what one connection receives: nothing lost, nothing twice, each of its size, and in
 * order within a producer and a subject. With latencies, also how long each was on its way. */
struct ledger {
    const struct work *work;
    uint64_t expected, received, duplicates, misordered;
    uint64_t first, range; /* indexes of a producer go from first, range of them */
    int64_t begun_ns, ended_ns;
    uint64_t *next;  /* by producer and subject: the index after the highest seen */
    uint64_t *seen;  /* one bit a record, the producers one after the other */
    int64_t *took_ns; /* NULL unless latencies are kept */
    bool rare;
};

/* For the roles subscribe and replay; for listen. An array of `number` of them. */
struct ledger *new_ledgers(const struct work *work, int number);
struct ledger *new_listener(const struct work *work);

void take(struct ledger *ledger, const char *body, size_t size);
bool complete(const struct ledger *ledger);

/* The results of subscribe and replay, of listen. */
void say_received(const struct ledger *ledgers, int number, struct begun begun);
void say_heard(struct ledger *ledger, struct begun begun);

/* Calls readable(k) whenever descriptors[k] can be read, until all ledgers are complete, or
 * nothing has come for work->idle_s: what is missing is then in the ledgers. */
void receive(const struct ledger *ledgers, int number, const int *descriptors, void (*readable)(int k));

/* --- requests ----------------------------------------------------------------------------- */

#define ECHO "re:"
#define ECHO_SIZE (sizeof ECHO - 1)

/* Round trips in flight: each reply is compared with its request and timed. */
struct requests {
    const struct work *work;
    uint64_t sent, answered;
    int64_t begun_ns;
    int64_t *sent_ns; /* by index; once it is answered, how long it took, negated */
    char *body;
};

struct requests new_requests(const struct work *work);
/* Returns the body of the next request, stamped and timed; of paced ones, when it is due. */
const char *next_request(struct requests *requests);
void take_reply(struct requests *requests, const char *reply, size_t size);
void say_answered(const struct requests *requests, struct begun begun);

#endif
