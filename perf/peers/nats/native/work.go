package main

// The driver protocol: what is asked arrives as key=value arguments, what is
// found leaves as lines of JSON, and a line on stdin says when to go on.
// The rule: a figure is either measured or not printed; fail() ends the program.

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const monotonicClock = 1 // CLOCK_MONOTONIC

// Work is one call of this program. Unknown keys are left aside: other drivers know them.
type Work struct {
	role, url, mode, subject, form, choice string

	size, count, window, producer, producers, subscribers, flight, workers, subjects int

	rate   float64
	paced  bool // requests are made at `rate`, each when it is due and the one before is answered
	seed   uint64
	rare   int           // above 0: one record in so many goes to the rare subject
	first  int           // by time: the number of the first record that must come
	fromNs int64         // by time: CLOCK_REALTIME from which on records are wanted
	idle   time.Duration // a consumer that hears nothing for so long says what it has
}

func parseWork(arguments []string) Work {
	given := map[string]string{}
	for _, argument := range arguments {
		key, value, found := strings.Cut(argument, "=")
		if !found {
			fail("an argument is key=value, not %q", argument)
		}
		given[key] = value
	}
	text := func(key, otherwise string) string {
		if value, found := given[key]; found {
			return value
		}
		return otherwise
	}
	number := func(key string, otherwise int) int {
		value, found := given[key]
		if !found {
			return otherwise
		}
		parsed, err := strconv.Atoi(value)
		if err != nil || parsed < 0 {
			fail("%s is a number of at least 0, not %q", key, value)
		}
		return parsed
	}
	decimal := func(key string, otherwise float64) float64 {
		value, found := given[key]
		if !found {
			return otherwise
		}
		parsed, err := strconv.ParseFloat(value, 64)
		if err != nil || parsed <= 0 {
			fail("%s is a number above 0, not %q", key, value)
		}
		return parsed
	}
	work := Work{
		role:        text("role", ""),
		url:         text("url", ""),
		mode:        text("mode", "core"),
		subject:     text("subject", "perf"),
		form:        text("form", "bulk"),
		choice:      text("select", "whole"),
		size:        number("size", 140),
		count:       number("count", 1000),
		window:      number("window", 4096),
		producer:    number("producer", 0),
		producers:   number("producers", 1),
		subscribers: number("subscribers", 1),
		flight:      number("flight", 64),
		workers:     number("workers", 1),
		subjects:    number("subjects", 1),
		rate:        decimal("rate", 1000),
		paced:       number("paced", 0) != 0,
		seed:        uint64(number("seed", 1)),
		rare:        number("rare", 0),
		first:       number("first", 0),
		fromNs:      int64(number("from_ns", 0)),
		idle:        time.Duration(decimal("idle_s", 20) * float64(time.Second)),
	}
	if work.size < 8 {
		fail("a record is at least 8 bytes, not %d", work.size)
	}
	for _, least := range []int{work.count, work.window, work.producers, work.subscribers, work.flight,
		work.workers, work.subjects, work.count - work.first} {
		if least < 1 {
			fail("count (above first), window, producers, subscribers, flight, workers and subjects are at least 1")
		}
	}
	return work
}

// body is a record before stamp() has said which.
func (w Work) body() []byte {
	return []byte(strings.Repeat("x", w.size))
}

func stamp(body []byte, producer, index int) {
	binary.LittleEndian.PutUint64(body, uint64(producer)<<48|uint64(index))
}

func stampOf(body []byte) (producer, index int) {
	stamped := binary.LittleEndian.Uint64(body)
	return int(stamped >> 48), int(stamped & (1<<48 - 1))
}

var stdin = bufio.NewReader(os.Stdin)

// ready says that everything is connected and subscribed, and waits for the word to go.
func ready(client string) {
	say(map[string]any{"ready": true, "client": client})
	if _, err := stdin.ReadString('\n'); err != nil {
		fail("no word to go: %v", err)
	}
}

// tell says what was found, and stays until nobody needs this process any more.
func tell(result map[string]any) {
	say(result)
	_, _ = stdin.ReadString('\n') // the end of the file is as good as a line
}

func say(line map[string]any) {
	encoded, err := json.Marshal(line)
	check(err)
	_, err = fmt.Println(string(encoded))
	check(err)
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, "nats_driver: "+format+"\n", values...)
	os.Exit(1)
}

// Go's clock is the monotonic one but hides its zero, which the other processes count from.
var (
	clockZero  = monotonicNow()
	clockStart = time.Now()
)

func now() int64 { return clockZero + int64(time.Since(clockStart)) }

func monotonicNow() int64 {
	var read syscall.Timespec
	_, _, errno := syscall.Syscall(
		syscall.SYS_CLOCK_GETTIME, monotonicClock, uintptr(unsafe.Pointer(&read)), 0)
	if errno != 0 {
		fail("no monotonic clock: %v", errno)
	}
	return read.Nano()
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return float64(used.Utime.Nano()+used.Stime.Nano()) / 1e9
}
