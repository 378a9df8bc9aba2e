package main

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"
)

const (
	maxLate   = 1000
	retryLate = time.Second
)

// errand is a call that no client waits for. It may be made again: reports are taken for a day, and repeating one, or giving
// a permit back twice, changes nothing.
type errand func(context.Context) error

// outbox makes errands. One that finds the service away or overloaded is kept and made again.
type outbox struct {
	owed   atomic.Int64 // errands that have not been made yet
	late   chan errand
	policy string // where the service is looked for
}

func newOutbox(policy string) *outbox {
	o := &outbox{late: make(chan errand, maxLate), policy: policy}
	go o.retry()
	return o
}

func (o *outbox) send(call errand) {
	o.owed.Add(1)
	go o.make(call)
}

// make is false where the errand is to be made again.
func (o *outbox) make(call errand) bool {
	err := call(context.Background())
	if isPassing(err) {
		o.keep(call)
		return false
	}
	o.owed.Add(-1)
	if err != nil {
		slog.Warn("the service did not take a report", "error", err)
	}
	return true
}

func (o *outbox) keep(call errand) {
	select {
	case o.late <- call:
	default:
		o.owed.Add(-1)
		slog.Error("a report is lost: too many are waiting for the service")
	}
}

// retry makes one errand after the other. One that fails goes to the back: it must not hold up those that would not.
func (o *outbox) retry() {
	for call := range o.late {
		if !o.make(call) {
			time.Sleep(retryLate)
		}
	}
}

// close waits until nothing is owed, as long as ctx lasts.
func (o *outbox) close(ctx context.Context) {
	for o.owed.Load() > 0 && ctx.Err() == nil {
		sleep(ctx, 10*time.Millisecond)
	}
	if lost := o.owed.Load(); lost > 0 {
		slog.Error("reports are lost: the service is away", "policy", o.policy, "reports", lost)
	}
}
