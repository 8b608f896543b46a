package main

// JetStream: records are kept in files and each publish is acknowledged; the
// publisher runs ahead of the acknowledgements by a window.

import (
	"bytes"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

var jetstreamRoles = map[string]func(Work){
	"publish": publishStored, "subscribe": subscribeStored,
	"fill": publishStored, "replay": replay,
	"pace": paceStored, "listen": listenStored,
}

func streamOf(w Work) string { return strings.ReplaceAll(w.subject, ".", "_") }

// open returns a context in which the stream of w.subject is there, made by whoever comes first.
func open(w Work, nc *nats.Conn) nats.JetStreamContext {
	js, err := nc.JetStream(nats.MaxWait(longest))
	check(err)
	_, err = js.AddStream(&nats.StreamConfig{
		Name:     streamOf(w),
		Subjects: []string{w.subject, w.subject + ".>"},
		Storage:  nats.FileStorage,
	})
	if err != nil {
		// Of two who make it at once the server tells one that the subjects overlap: then it is there.
		if _, absent := js.StreamInfo(streamOf(w)); absent != nil {
			fail("no stream %s: %v", streamOf(w), err)
		}
	}
	return js
}

// Acks are the acknowledgements of all that one publisher sent, in one inbox. The client's own
// PublishAsync makes a subject, a future and an entry in a map for each record.
type Acks struct {
	nc    *nats.Conn
	inbox string

	mutex sync.Mutex
	moved *sync.Cond
	acked int
	sent  int // the publisher's own
}

func newAcks(w Work, nc *nats.Conn) *Acks {
	a := &Acks{nc: nc, inbox: nats.NewInbox()}
	a.moved = sync.NewCond(&a.mutex)
	unbounded(nc.Subscribe(a.inbox, func(m *nats.Msg) {
		if len(m.Data) == 0 || bytes.Contains(m.Data, []byte(`"error"`)) {
			fail("a record was refused: %s%s", m.Data, m.Header.Get("Status"))
		}
		a.mutex.Lock()
		a.acked++
		a.mutex.Unlock()
		a.moved.Signal()
	}))
	return a
}

func (a *Acks) publish(subject string, body []byte) {
	check(a.nc.PublishRequest(subject, a.inbox, body))
	a.sent++
}

// settle waits until at most `out` records are not acknowledged.
func (a *Acks) settle(out int) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for a.sent-a.acked > out {
		a.moved.Wait()
	}
}

// isRare says which records of a fill go to the rare subject: one in each block, at a place that the seed decides.
func isRare(w Work, index int) bool {
	if w.rare == 0 {
		return false
	}
	return int(splitmix64(w.seed+uint64(index/w.rare))%uint64(w.rare)) == index%w.rare
}

// splitmix64 is the finaliser of Steele, Lea and Flood's SplitMix: far apart for neighbours, the same in all drivers.
func splitmix64(value uint64) uint64 {
	value += 0x9e3779b97f4a7c15
	value = (value ^ value>>30) * 0xbf58476d1ce4e5b9
	value = (value ^ value>>27) * 0x94d049bb133111eb
	return value ^ value>>31
}

// publishStored publishes, and fills: then it pauses at its middle, for a replay from that time on.
func publishStored(w Work) {
	nc := connect(w)
	open(w, nc)
	acks := newAcks(w, nc)
	subjects, rare, body := namesOf(w, "x"), w.subject+".rare", w.body()
	result := map[string]any{}
	ready(client)
	cpu, begun := cpuSeconds(), now()
	for i := 0; i < w.count; i++ {
		if w.role == "fill" && i == w.count/2 {
			acks.settle(0)
			time.Sleep(25 * time.Millisecond)
			result["middle"], result["middle_ns"] = i, time.Now().UnixNano()
			time.Sleep(25 * time.Millisecond)
		}
		acks.settle(w.window - 1)
		stamp(body, w.producer, i)
		if isRare(w, i) {
			acks.publish(rare, body)
		} else {
			acks.publish(subjects[i%len(subjects)], body)
		}
	}
	acks.settle(0)
	result["begun_ns"], result["ended_ns"], result["confirmed"] = begun, now(), acks.acked
	result["cpu_s"] = cpuSeconds() - cpu
	tell(result)
}

// listenTo delivers what `pattern` matches in the stream's order, with flow control and without acks.
func listenTo(w Work, js nats.JetStreamContext, pattern string, record func([]byte), from nats.SubOpt) {
	unbounded(js.Subscribe(pattern, func(m *nats.Msg) { record(m.Data) },
		nats.BindStream(streamOf(w)), from, nats.AckNone(), nats.ManualAck(),
		nats.EnableFlowControl(), nats.IdleHeartbeat(5*time.Second)))
}

func subscribeStored(w Work) {
	var links []*nats.Conn
	var ledgers []*Ledger
	var done sync.WaitGroup
	patterns := namesOf(w, "*")
	for s := 0; s < w.subscribers; s++ {
		nc := connect(w)
		links = append(links, nc)
		js := open(w, nc)
		for k, pattern := range patterns {
			done.Add(1)
			ledger := newLedger(w, k, len(patterns), done.Done)
			ledgers = append(ledgers, ledger)
			listenTo(w, js, pattern, ledger.record, nats.DeliverNew())
		}
	}
	ready(client)
	cpu := cpuSeconds()
	await(w, &done, links...)
	tell(verdict(ledgers, cpuSeconds()-cpu))
	remove(w)
}

// remove deletes the stream; over a link of its own, because the consumer's may have been closed.
func remove(w Work) {
	js, err := connect(w).JetStream(nats.MaxWait(longest))
	check(err)
	check(js.DeleteStream(streamOf(w)))
}

func replay(w Work) {
	nc := connect(w)
	js := open(w, nc)
	pattern, from := w.subject, nats.DeliverAll()
	if w.subjects > 1 || w.rare > 0 {
		pattern = w.subject + ".>"
	}
	switch w.choice {
	case "rare":
		pattern = w.subject + ".rare"
	case "time":
		from = nats.StartTime(time.Unix(0, w.fromNs))
	}
	var done sync.WaitGroup
	done.Add(1)
	ledger := newLedger(w, 0, 1, done.Done)
	ready(client)
	cpu, begun := cpuSeconds(), now()
	listenTo(w, js, pattern, ledger.record, from)
	await(w, &done, nc)
	ledger.begun = begun // the server's search is part of it
	tell(verdict([]*Ledger{ledger}, cpuSeconds()-cpu))
}

func paceStored(w Work) {
	nc := connect(w)
	open(w, nc)
	acks := newAcks(w, nc)
	body := w.body()
	ready(client)
	cpu, begun := cpuSeconds(), now()
	evenly(w, begun, func(i int) {
		timeStamp(body, w.producer, i)
		acks.publish(w.subject, body)
	})
	acks.settle(0)
	tell(map[string]any{"begun_ns": begun, "ended_ns": now(), "cpu_s": cpuSeconds() - cpu})
}

func listenStored(w Work) {
	nc := connect(w)
	js := open(w, nc)
	var done sync.WaitGroup
	done.Add(1)
	l := newListener(w, done.Done)
	listenTo(w, js, w.subject, l.record, nats.DeliverNew())
	ready(client)
	cpu := cpuSeconds()
	await(w, &done, nc)
	tell(l.result(cpuSeconds() - cpu))
	remove(w)
}
