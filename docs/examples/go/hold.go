package main

import (
	"context"
	"log/slog"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// held is what a decision holds while it is carried out: its token, and the renewal of its permits.
type held struct {
	token     []byte
	since     time.Time
	stop      context.CancelFunc
	transport *Transport
}

func (j *journey) hold(decision *policyv1.SelectTargetResponse) *held {
	ctx, stop := context.WithCancel(context.Background())
	h := &held{token: decision.GetDecisionToken(), since: time.Now(), stop: stop, transport: j.Transport}
	for _, permit := range decision.GetDispatch().GetPermits() {
		life := milliseconds(permit.GetExpiresAtUnixMs() - decision.GetDecidedAtUnixMs())
		go h.renew(ctx, max(life/3, 100*time.Millisecond))
		break // one call renews all permits of the decision
	}
	return h
}

// renew keeps the permits of a long answer. Without it their slots go to others when the TTL ends.
func (h *held) renew(ctx context.Context, every time.Duration) {
	for {
		sleep(ctx, every)
		if ctx.Err() != nil {
			return
		}
		answer, err := h.transport.service.Renew(ctx, h.token)
		for _, permit := range answer.GetResults() {
			if permit.GetCode() != "" {
				slog.Warn("a permit is lost", "permit", permit.GetPermitId(), "code", permit.GetCode())
			}
		}
		if err != nil && ctx.Err() == nil {
			slog.Warn("permits were not renewed", "error", err)
		}
	}
}

// release frees what the decision holds where none of its reports was the final one.
func (h *held) release() {
	h.stop()
	h.transport.outbox.send(func(ctx context.Context) error {
		return h.transport.service.Release(ctx, h.token)
	})
}
