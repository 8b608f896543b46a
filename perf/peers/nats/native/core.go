package main

// NATS core: nothing is kept, nobody confirms; a flush's round trip says that
// the server has read everything.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

var coreRoles = map[string]func(Work){
	"publish": publish, "subscribe": subscribe,
	"request": request, "respond": respond,
	"pace": pace, "listen": listen,
}

// namesOf are a name for each subject, `<subject>.<k>.<tail>`; of one subject the bare name.
func namesOf(w Work, tail string) []string {
	if w.subjects == 1 && w.rare == 0 {
		return []string{w.subject}
	}
	names := make([]string, w.subjects)
	for k := range names {
		names[k] = fmt.Sprintf("%s.%d.%s", w.subject, k, tail)
	}
	return names
}

func publish(w Work) {
	nc := connect(w)
	subjects, body := namesOf(w, "x"), w.body()
	ready(client)
	cpu, begun := cpuSeconds(), now()
	for i := 0; i < w.count; i++ {
		stamp(body, w.producer, i)
		check(nc.Publish(subjects[i%len(subjects)], body))
	}
	check(nc.FlushTimeout(longest))
	tell(map[string]any{
		"begun_ns": begun, "ended_ns": now(), "confirmed": w.count, "cpu_s": cpuSeconds() - cpu,
	})
}

func subscribe(w Work) {
	var links []*nats.Conn
	var ledgers []*Ledger
	var done sync.WaitGroup
	patterns := namesOf(w, "*")
	for s := 0; s < w.subscribers; s++ {
		nc := connect(w)
		links = append(links, nc)
		for k, pattern := range patterns {
			done.Add(1)
			ledger := newLedger(w, k, len(patterns), done.Done)
			ledgers = append(ledgers, ledger)
			unbounded(nc.Subscribe(pattern, func(m *nats.Msg) { ledger.record(m.Data) }))
		}
		check(nc.FlushTimeout(longest))
	}
	ready(client)
	cpu := cpuSeconds()
	await(w, &done, links...)
	tell(verdict(ledgers, cpuSeconds()-cpu))
}

func request(w Work) {
	ask := askFromGoroutines
	if w.mode == "core-async" {
		ask = askFromCallback
	}
	nc := connect(w)
	check(nc.FlushTimeout(longest))
	ready(client)
	cpu, begun := cpuSeconds(), now()
	took := ask(w, nc)
	result := map[string]any{"begun_ns": begun, "ended_ns": now(), "cpu_s": cpuSeconds() - cpu}
	quantiles(took, result)
	tell(result)
}

// askFromGoroutines is what the client's documentation shows: Request in as many goroutines as are in flight.
func askFromGoroutines(w Work, nc *nats.Conn) []int64 {
	took := make([]int64, w.count)
	begun := now()
	var done sync.WaitGroup
	for f := 0; f < w.flight; f++ {
		done.Add(1)
		go func(first int) {
			defer done.Done()
			body := w.body()
			for i := first; i < w.count; i += w.flight {
				if w.paced {
					w.await(begun, i)
				}
				stamp(body, w.producer, i)
				asked := now()
				reply, err := nc.Request(w.subject, body, longest)
				check(err)
				took[i] = now() - asked
				compare(reply.Data, body)
			}
		}(f)
	}
	done.Wait()
	return took
}

// askFromCallback has one subscription for all replies; each reply sends its slot's next request.
func askFromCallback(w Work, nc *nats.Conn) []int64 {
	took := make([]int64, w.count)
	inbox := nats.NewInbox()
	type slot struct {
		body  []byte
		reply string
		asked int64
		index int
	}
	slots := make(map[string]*slot, w.flight)
	var done sync.WaitGroup
	done.Add(w.count)
	sent := 0
	send := func(s *slot) {
		s.index = sent
		sent++
		stamp(s.body, w.producer, s.index)
		s.asked = now()
		check(nc.PublishRequest(w.subject, s.reply, s.body))
	}
	var first sync.Mutex // replies wait until every slot has sent its first request
	first.Lock()
	unbounded(nc.Subscribe(inbox+".*", func(m *nats.Msg) {
		first.Lock()
		defer first.Unlock()
		s := slots[m.Subject]
		if s == nil {
			fail("a reply to %s: %s", m.Subject, m.Header.Get("Status"))
		}
		took[s.index] = now() - s.asked
		compare(m.Data, s.body)
		if sent < w.count {
			send(s)
		}
		done.Done()
	}))
	for f := 0; f < w.flight && f < w.count; f++ {
		s := &slot{body: w.body(), reply: fmt.Sprintf("%s.%d", inbox, f)}
		slots[s.reply] = s
		send(s)
	}
	first.Unlock()
	done.Wait()
	return took
}

var echo = []byte("re:")

func compare(reply, body []byte) {
	if !bytes.HasPrefix(reply, echo) || !bytes.Equal(reply[len(echo):], body) {
		fail("a reply of %d bytes is not that of its request", len(reply))
	}
}

// respond runs its workers on one connection each, in one queue group, until it is told to stop.
func respond(w Work) {
	for k := 0; k < w.workers; k++ {
		nc := connect(w)
		reply := append([]byte{}, echo...)
		unbounded(nc.QueueSubscribe(w.subject, "workers", func(m *nats.Msg) {
			reply = append(reply[:len(echo)], m.Data...)
			check(m.Respond(reply))
		}))
		check(nc.FlushTimeout(longest))
	}
	cpu := cpuSeconds()
	ready(client)
	tell(map[string]any{"cpu_s": cpuSeconds() - cpu})
}

func pace(w Work) {
	nc := connect(w)
	body := w.body()
	ready(client)
	cpu, begun := cpuSeconds(), now()
	evenly(w, begun, func(i int) {
		timeStamp(body, w.producer, i)
		check(nc.Publish(w.subject, body))
	})
	check(nc.FlushTimeout(longest))
	tell(map[string]any{"begun_ns": begun, "ended_ns": now(), "cpu_s": cpuSeconds() - cpu})
}

// evenly calls send(i) when record i is due, w.rate of them a second from `begun` on.
func evenly(w Work, begun int64, send func(int)) {
	for i := 0; i < w.count; i++ {
		w.await(begun, i)
		send(i)
	}
}

// await returns when record i is due.
func (w Work) await(begun int64, i int) {
	due := begun + int64(float64(i)*1e9/w.rate)
	if wait := due - now(); wait > 0 {
		time.Sleep(time.Duration(wait))
	}
}

func timeStamp(body []byte, producer, index int) {
	if len(body) < 16 {
		fail("a record with its time is at least 16 bytes, not %d", len(body))
	}
	stamp(body, producer, index)
	binary.LittleEndian.PutUint64(body[8:], uint64(now()))
}

func listen(w Work) {
	nc := connect(w)
	var done sync.WaitGroup
	done.Add(1)
	l := newListener(w, done.Done)
	unbounded(nc.Subscribe(w.subject, func(m *nats.Msg) { l.record(m.Data) }))
	check(nc.FlushTimeout(longest))
	ready(client)
	cpu := cpuSeconds()
	await(w, &done, nc)
	tell(l.result(cpuSeconds() - cpu))
}
