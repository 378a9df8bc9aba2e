package main

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// attempt is one upstream call under a decision.
type attempt struct {
	*journey
	held      *held
	dispatch  *policyv1.Dispatch
	number    int32
	target    *policyv1.Target
	headers   []*policyv1.Header // to set on this call
	following *policyv1.Target   // the target behind this one; nil: none
	offset    time.Duration      // from the decision to this call
}

// make calls the target. A success has no action: it is on its way to the client and is reported when its body ends. A failure
// is reported at once; `response` is what the client gets if the action is to go no further.
func (a *attempt) make(ctx context.Context) (response *http.Response, action *policyv1.Action) {
	if refusal := a.checkFence(ctx); refusal != nil {
		return refusal, nil
	}
	a.offset = time.Since(a.held.since)
	r := a.call(ctx, a.target, wishes{
		timeout: milliseconds(a.dispatch.GetAttemptPolicy().GetTargetTimeoutMs()),
		set:     a.headers, strip: a.dispatch.GetStripHeaders(), degradations: a.dispatch.GetDegradations(),
	})
	if ctx.Err() != nil {
		r.close()
		r.cancelled = true
		a.finish(r)
		return nil, nil
	}
	if !r.failed {
		a.held.reported = true
		return r.stream(ctx, milliseconds(a.config.IdleTimeoutMs), a.finish), nil
	}
	return a.afterFailure(ctx, r)
}

// finish sends the last report of the decision, which frees its permits, without keeping anybody waiting.
func (a *attempt) finish(r *result) {
	a.held.reported = true
	a.held.stop()
	a.deliver(a.report(r, true))
}

func (a *attempt) deliver(report *policyv1.ReportOutcomeRequest) {
	a.outbox.send(func(ctx context.Context) error {
		_, err := a.service.Report(ctx, report)
		return err
	})
}

func (a *attempt) afterFailure(ctx context.Context, r *result) (*http.Response, *policyv1.Action) {
	report := a.report(r, false) // whether another attempt follows is only known from the answer
	answer, err := a.service.Report(ctx, report)
	if err != nil {
		a.deliver(report)
		return r.forClient(a.request, nil), a.localAction(r)
	}
	verdict, action := answer.GetVerdict(), answer.GetAction()
	slog.Info("attempt failed", "target", name(a.target), "outcome", r.text(), "verdict", verdict.GetReasonText(),
		"action", action.GetKindText())
	a.earlier = append(a.earlier, earlierAttempt(a.target, r, verdict))
	return r.forClient(a.request, verdict), action
}

// localAction stands in for the service where a report found nobody: on to the next target of the decision, if there is one.
func (a *attempt) localAction(r *result) *policyv1.Action {
	action := &policyv1.Action{Kind: policyv1.ActionKind_ACTION_KIND_RETURN_TO_CLIENT}
	if a.config.FailMode == "open" && a.following != nil && r.isWorthAnother() {
		action.Kind, action.NextTarget = policyv1.ActionKind_ACTION_KIND_FALL_BACK, a.following
	}
	return action
}

// checkFence is the last word before a call with a lease that no fresh decision covers: a session that has lost its connection
// meanwhile must not use it.
func (a *attempt) checkFence(ctx context.Context) *http.Response {
	if a.lease == nil || (a.number == 0 && time.Since(a.held.since) < time.Second) {
		return nil
	}
	answer, err := a.service.Fence(ctx, &policyv1.CheckFenceRequest{
		CallerKeySha256: a.caller, Lease: a.lease, Connection: a.target.GetConnection(), DecisionToken: a.held.token,
	})
	if err != nil {
		return refused(a.request, err)
	}
	if answer.GetStatus() == policyv1.FenceStatus_FENCE_STATUS_VALID {
		return nil
	}
	return failure(a.request, problem{http.StatusConflict, fenceCode(answer.GetStatus()), "lease_error",
		"the lease does not hold any more", 0})
}
