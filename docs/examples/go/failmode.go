package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// memory is what the gateway remembers for the time when the service is away.
type memory struct {
	mutex  sync.Mutex
	orders map[string][]*policyv1.Target // of each route, the last one
	barred map[string]bool               // targets that may not be used without the service: leased, managed, capped
}

func newMemory() *memory {
	return &memory{orders: map[string][]*policyv1.Target{}, barred: map[string]bool{}}
}

func (m *memory) learn(route string, dispatch *policyv1.Dispatch) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.orders[route] = append([]*policyv1.Target{dispatch.GetTarget()}, dispatch.GetFallbacks()...)
	if dispatch.GetNoFailOpen() {
		m.barred[name(dispatch.GetTarget())] = true
	} else {
		delete(m.barred, name(dispatch.GetTarget()))
	}
}

// order is the last known order of a route without the targets that are barred.
func (m *memory) order(route string) []*policyv1.Target {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return slices.DeleteFunc(slices.Clone(m.orders[route]), func(target *policyv1.Target) bool { return m.barred[name(target)] })
}

// withoutDecision answers where SelectTarget failed. Only a service that is away may be done without, and never for a lease.
func (j *journey) withoutDecision(ctx context.Context, err error) (*http.Response, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	slog.Warn("no decision", "route", j.route, "error", err)
	if !errors.Is(err, ErrAway) {
		return refused(j.request, err), nil
	}
	if j.config.FailMode == "open" && j.lease == nil {
		if response := j.failOpen(ctx); response != nil {
			return response, nil
		}
	}
	return failure(j.request, problem{http.StatusServiceUnavailable, "policy_unavailable", "service_unavailable",
		"no decision can be made now", time.Second}), nil
}

// failOpen follows the last known order. Nil: there is none. What these calls bring is not reported.
func (j *journey) failOpen(ctx context.Context) *http.Response {
	order := j.memory.order(j.route)
	for place, target := range order {
		r := j.call(ctx, target, wishes{})
		if !r.failed {
			return r.stream(ctx, milliseconds(j.config.IdleTimeoutMs), func(*result) {})
		}
		response := r.forClient(j.request, nil)
		if place == len(order)-1 || !r.isWorthAnother() || ctx.Err() != nil {
			return response
		}
		discard(response)
	}
	return nil
}
