package main

import (
	"context"
	"log/slog"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// secondLook is how long after the first look for a grant that nobody has heard of the second one follows.
const secondLook = 2 * time.Second

// held is what a decision holds while it is carried out: its token, and the renewal of its permits.
type held struct {
	token     []byte
	since     time.Time
	stop      context.CancelFunc // ends the renewal
	reported  bool               // a final report is out, or will be when the body of the answer ends
	transport *Transport
}

func (j *journey) hold(decision *policyv1.SelectTargetResponse) *held {
	ctx, stop := context.WithCancel(context.Background())
	h := &held{token: decision.GetDecisionToken(), since: time.Now(), stop: stop, transport: j.Transport}
	if life := shortestLife(decision); life > 0 {
		go h.renew(ctx, max(life/3, 100*time.Millisecond))
	}
	return h
}

// shortestLife of the permits of a decision, which one call renews; 0: it has none.
func shortestLife(decision *policyv1.SelectTargetResponse) time.Duration {
	shortest := time.Duration(0)
	for _, permit := range decision.GetDispatch().GetPermits() {
		life := max(milliseconds(permit.GetExpiresAtUnixMs()-decision.GetDecidedAtUnixMs()), 1)
		if shortest == 0 || life < shortest {
			shortest = life
		}
	}
	return shortest
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

// end frees what the decision holds where none of its reports is the final one.
func (h *held) end() {
	if h.reported {
		return
	}
	h.stop()
	h.transport.outbox.send(func(ctx context.Context) error {
		return h.transport.service.Release(ctx, h.token)
	})
}

// withdraw gives back what a SelectTarget took whose answer did not arrive, and a place in line that nobody comes back for. The
// service may not be through with that call: where it finds nothing it is asked once more.
func (t *Transport) withdraw(requestID string) {
	look := func(ctx context.Context) (bool, error) { return t.service.Cancel(ctx, requestID) }
	t.outbox.send(func(ctx context.Context) error {
		found, err := look(ctx)
		if err == nil && !found {
			time.AfterFunc(secondLook, func() {
				t.outbox.send(func(ctx context.Context) error { _, err := look(ctx); return err })
			})
		}
		return err
	})
}
