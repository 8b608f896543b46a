// The NATS driver: plays the roles of perf/ with the Go client that Debian
// packages, in the form its users write: asynchronous callbacks, publishes that
// gather in the client's buffer, requests from many goroutines, or in mode core-async from the call-back
// of the reply before.
package main

import (
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	client = "nats.go " + nats.Version
	// No single answer of the server takes so long.
	longest = 60 * time.Second
)

func main() {
	w := parseWork(os.Args[1:])
	roles := coreRoles
	if w.mode == "jetstream" || w.mode == "jetstream-sync" {
		roles = jetstreamRoles
	} else if w.mode != "core" && w.mode != "core-async" {
		fail("no mode %q", w.mode)
	}
	play, found := roles[w.role]
	if !found {
		fail("no role %q in mode %s", w.role, w.mode)
	}
	play(w)
}

// connect fails for good when the link does: a reconnect would hide a loss.
func connect(w Work) *nats.Conn {
	nc, err := nats.Connect(w.url,
		nats.NoReconnect(),
		nats.Timeout(longest),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				fail("the link was lost: %v", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { fail("%v", err) }))
	check(err)
	return nc
}

// unbounded lets what arrives wait in memory rather than be dropped.
func unbounded(subscription *nats.Subscription, err error) {
	check(err)
	check(subscription.SetPendingLimits(-1, -1))
}

// await returns when `done` is, or when nothing has arrived at `links` for w.idle.
func await(w Work, done *sync.WaitGroup, links ...*nats.Conn) {
	complete := make(chan struct{})
	go func() { done.Wait(); close(complete) }()
	var before uint64
	heard := time.Now()
	for {
		select {
		case <-complete:
			return
		case <-time.After(time.Second):
		}
		var arrived uint64
		for _, nc := range links {
			arrived += nc.Stats().InMsgs
		}
		if arrived != before {
			before, heard = arrived, time.Now()
		}
		if time.Since(heard) > w.idle {
			for _, nc := range links {
				nc.Close() // no callback writes a ledger any more
			}
			return
		}
	}
}
