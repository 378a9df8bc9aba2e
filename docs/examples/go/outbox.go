package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

const (
	maxLate   = 1000
	retryLate = time.Second
)

// outbox makes calls that no client waits for. One that finds the service away is kept and made again: reports are taken for a
// day, and repeating one changes nothing.
type outbox struct {
	underWay sync.WaitGroup
	late     chan func(context.Context) error
}

func newOutbox() *outbox {
	o := &outbox{late: make(chan func(context.Context) error, maxLate)}
	go o.retry()
	return o
}

func (o *outbox) send(call func(context.Context) error) {
	o.underWay.Go(func() {
		err := call(context.Background())
		switch {
		case errors.Is(err, ErrAway):
			o.keep(call)
		case err != nil:
			slog.Warn("the service did not take a report", "error", err)
		}
	})
}

func (o *outbox) keep(call func(context.Context) error) {
	select {
	case o.late <- call:
	default:
		slog.Error("a report is lost: too many are waiting for the service")
	}
}

func (o *outbox) retry() {
	for call := range o.late {
		for errors.Is(call(context.Background()), ErrAway) {
			time.Sleep(retryLate)
		}
	}
}

// wait until what is under way is out, or the time is over.
func (o *outbox) wait(ctx context.Context) {
	done := make(chan struct{})
	go func() { o.underWay.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
	}
}
