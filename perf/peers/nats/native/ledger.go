package main

// What arrived, against what was to arrive: nothing lost, nothing twice, each
// producer's records in their order, every one of its size.

import (
	"encoding/binary"
	"sort"
)

// Ledger judges what one subscription receives. One goroutine writes it.
type Ledger struct {
	w            Work
	lane, lanes  int // it is for the records whose index is lane modulo lanes
	expected     int
	received     int
	duplicates   int
	misordered   int
	begun, ended int64
	next         []int      // by producer: the index after the highest seen
	seen         [][]uint64 // by producer: one bit a record of the lane
	complete     func()     // called once, when all that is expected has come
}

// newLedger is for records from w.first on; of one lane, or of the rare subject when that is selected.
func newLedger(w Work, lane, lanes int, complete func()) *Ledger {
	l := &Ledger{w: w, lane: lane, lanes: lanes, complete: complete}
	for i := w.first; i < w.count; i++ {
		if i%lanes == lane && (w.choice != "rare" || isRare(w, i)) {
			l.expected += w.producers
		}
	}
	if l.expected == 0 {
		complete()
	}
	l.next = make([]int, w.producers)
	for range l.next {
		l.seen = append(l.seen, make([]uint64, w.count/lanes/64+1))
	}
	return l
}

func (l *Ledger) record(body []byte) {
	if len(body) != l.w.size {
		fail("a record of %d bytes, not %d", len(body), l.w.size)
	}
	producer, index := stampOf(body)
	if producer >= l.w.producers || index < l.w.first || index >= l.w.count || index%l.lanes != l.lane {
		fail("record %d of producer %d was not asked for", index, producer)
	}
	if l.w.choice == "rare" && !isRare(l.w, index) {
		fail("record %d is not rare", index)
	}
	place := index / l.lanes
	word, bit := &l.seen[producer][place/64], uint64(1)<<(place%64)
	if *word&bit != 0 {
		l.duplicates++
		return
	}
	*word |= bit
	if index < l.next[producer] {
		l.misordered++
	} else {
		l.next[producer] = index + 1
	}
	if l.received == 0 {
		l.begun = now()
	}
	l.received++
	if l.received == l.expected {
		l.ended = now()
		l.complete()
	}
}

// verdict adds up the ledgers of all subscriptions, which are not written any more.
func verdict(ledgers []*Ledger, cpu float64) map[string]any {
	var begun, ended int64
	var received, missing, duplicates, misordered int
	for _, l := range ledgers {
		if l.received > 0 && (begun == 0 || l.begun < begun) {
			begun = l.begun
		}
		if l.received < l.expected {
			l.ended = now()
		}
		if l.ended > ended {
			ended = l.ended
		}
		received += l.received
		missing += l.expected - l.received
		duplicates += l.duplicates
		misordered += l.misordered
	}
	if received == 0 {
		fail("nothing arrived")
	}
	return map[string]any{
		"begun_ns": begun, "ended_ns": ended, "received": received, "missing": missing,
		"duplicates": duplicates, "misordered": misordered, "cpu_s": cpu,
	}
}

// Listener keeps how long each record was on its way, too.
type Listener struct {
	ledger *Ledger
	took   []int64
}

func newListener(w Work, complete func()) *Listener {
	return &Listener{newLedger(w, 0, 1, complete), make([]int64, 0, w.count)}
}

func (l *Listener) record(body []byte) {
	l.took = append(l.took, now()-int64(binary.LittleEndian.Uint64(body[8:])))
	l.ledger.record(body)
}

func (l *Listener) result(cpu float64) map[string]any {
	ledger := l.ledger
	if ledger.received < ledger.expected || ledger.duplicates > 0 || ledger.misordered > 0 {
		fail("%d of %d records arrived, %d twice, %d out of order",
			ledger.received, ledger.expected, ledger.duplicates, ledger.misordered)
	}
	result := map[string]any{"received": ledger.received, "cpu_s": cpu}
	quantiles(l.took, result)
	return result
}

// quantiles adds p50, p99 and p99.9 of `nanoseconds`, which it sorts, to `result`.
func quantiles(nanoseconds []int64, result map[string]any) {
	sort.Slice(nanoseconds, func(a, b int) bool { return nanoseconds[a] < nanoseconds[b] })
	for name, thousandths := range map[string]int{"p50_us": 500, "p99_us": 990, "p999_us": 999} {
		result[name] = float64(nanoseconds[len(nanoseconds)*thousandths/1000]) / 1e3
	}
}
