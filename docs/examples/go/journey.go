package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

const (
	maxRequestBytes = 32 << 20
	maxDispatches   = 30 // where the service says nothing else
)

// journey is one client request on its way: ask, call, report and fall back until there is an answer.
type journey struct {
	*Transport
	request  *http.Request
	body     map[string]json.RawMessage
	route    string
	id       string
	caller   string // SHA-256 of the client's key
	lease    *policyv1.LeaseContext
	deadline time.Time
	patient  bool   // ready to wait for a target
	asked    int    // SelectTarget calls so far
	askedAs  string // request id of the last one
	attempts int    // upstream calls so far
	token    []byte
	earlier  []*policyv1.EarlierAttempt
}

func (t *Transport) begin(request *http.Request) (*journey, *http.Response) {
	body, model, err := readBody(request)
	if err != nil {
		return nil, failure(request, problem{unreadable(err), "invalid_request", "invalid_request_error", err.Error(), 0})
	}
	lease, code := leaseOf(request.Header)
	if code != "" {
		return nil, failure(request, problem{http.StatusBadRequest, code, "lease_error", "the lease headers cannot be used", 0})
	}
	route, found := t.config.Routes[model]
	if !found {
		route = model
	}
	return &journey{
		Transport: t, request: request, body: body, route: route, id: rand.Text(), caller: callerOf(request.Header),
		lease: lease, deadline: time.Now().Add(milliseconds(t.config.RequestTimeoutMs)),
	}, nil
}

// readBody keeps the body for every attempt; fields that the gateway does not know travel as they came.
func readBody(request *http.Request) (body map[string]json.RawMessage, model string, err error) {
	if request.Body == nil {
		return nil, "", errNoModel
	}
	defer request.Body.Close()
	text, err := io.ReadAll(http.MaxBytesReader(nil, request.Body, maxRequestBytes))
	if err != nil {
		return nil, "", err
	}
	if json.Unmarshal(text, &body) != nil || json.Unmarshal(body["model"], &model) != nil || model == "" {
		return nil, "", errNoModel
	}
	return body, model, nil
}

// unreadable is the status for a body that cannot be used.
func unreadable(err error) int {
	var tooLarge *http.MaxBytesError
	var network net.Error
	switch {
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge
	case errors.As(err, &network) && network.Timeout():
		return http.StatusRequestTimeout
	}
	return http.StatusBadRequest
}

// leaseOf reads the lease headers; the code of the contract where they cannot be used.
func leaseOf(headers http.Header) (lease *policyv1.LeaseContext, code string) {
	owner, ownerFits := controlHeader(headers, "Lease-Owner")
	text, textFits := controlHeader(headers, "Lease-Generation")
	if !ownerFits || !textFits {
		return nil, "LEASE_CONTEXT_INVALID"
	}
	if owner == "" && text == "" {
		return nil, ""
	}
	if owner == "" || text == "" {
		return nil, "LEASE_CONTEXT_REQUIRED"
	}
	generation, err := strconv.ParseInt(text, 10, 64)
	if err != nil || strconv.FormatInt(generation, 10) != text || generation < 1 {
		return nil, "LEASE_CONTEXT_INVALID"
	}
	return &policyv1.LeaseContext{Owner: owner, Generation: generation}, ""
}

// controlHeader reads a header of the policy by its name or its alias; false where it is there twice and says different things.
func controlHeader(headers http.Header, name string) (value string, fits bool) {
	values := slices.Concat(headers.Values("X-Policy-"+name), headers.Values("X-OmniRoute-"+name))
	slices.Sort(values)
	values = slices.Compact(slices.DeleteFunc(values, func(value string) bool { return value == "" }))
	return strings.Join(values, ", "), len(values) < 2
}

// callerOf is the hash that the catalogue knows the client's key by; the key itself never leaves the gateway.
func callerOf(headers http.Header) string {
	scheme, key, _ := strings.Cut(headers.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") || key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// run asks and does what the verdict says until there is an answer for the client.
func (j *journey) run(ctx context.Context) (*http.Response, error) {
	for ctx.Err() == nil {
		decision, err := j.selectTarget(ctx)
		if err != nil {
			return j.withoutDecision(ctx, err)
		}
		var response *http.Response
		switch verdict := decision.GetVerdict().(type) {
		case *policyv1.SelectTargetResponse_Dispatch:
			j.memory.learn(j.route, verdict.Dispatch)
			response = j.walk(ctx, decision, verdict.Dispatch)
		case *policyv1.SelectTargetResponse_Wait:
			response = j.wait(ctx, verdict.Wait)
		case *policyv1.SelectTargetResponse_Reject:
			response = j.reject(verdict.Reject)
		default:
			response = failure(j.request, problem{http.StatusServiceUnavailable, "unknown_verdict", "service_unavailable",
				"this gateway does not know the verdict of the service", 0})
		}
		if response != nil {
			return response, nil
		}
	}
	return nil, ctx.Err()
}

// selectTarget wants an answer at once first. Only after a refusal that time may cure it asks again, ready to stand in line:
// so a service that does not answer is noticed after SelectTimeoutMs, not at the end of the longest line.
func (j *journey) selectTarget(ctx context.Context) (*policyv1.SelectTargetResponse, error) {
	j.askedAs = j.id + "-" + strconv.Itoa(j.asked)
	request := &policyv1.SelectTargetRequest{
		RequestId:             j.askedAs,
		Route:                 j.route,
		CallerKeySha256:       j.caller,
		Session:               sessionOf(j.request.Header, j.body),
		DeadlineMs:            proto.Int64(j.left().Milliseconds()),
		AllowWait:             proto.Bool(j.patient),
		EarlierAttempts:       j.earlier,
		Lease:                 j.lease,
		PreviousDecisionToken: j.token,
	}
	patience := time.Duration(0)
	if j.patient {
		patience = j.left()
		request.WaitBudgetMs = proto.Int64(patience.Milliseconds())
	}
	decision, err := j.service.Select(ctx, request, patience)
	if isCutOff(err) {
		j.withdraw(j.askedAs)
	}
	j.token = decision.GetDecisionToken()
	j.asked++
	return decision, err
}

// sessionOf lets the requests of one conversation stay with one account.
func sessionOf(headers http.Header, body map[string]json.RawMessage) *policyv1.SessionSource {
	session := &policyv1.SessionSource{}
	if id := headers.Get("X-Session-Id"); id != "" {
		session.Headers = []*policyv1.Header{{Name: "x-session-id", Value: id}}
	}
	_ = json.Unmarshal(body["conversation_id"], &session.ConversationId)
	_ = json.Unmarshal(body["prompt_cache_key"], &session.PromptCacheKey)
	return session
}

func (j *journey) left() time.Duration { return max(time.Until(j.deadline), 0) }

// wait sleeps as told if the client lives to see the end. Nil: ask again.
func (j *journey) wait(ctx context.Context, wait *policyv1.Wait) *http.Response {
	pause := milliseconds(wait.GetWaitMs())
	if pause < j.left() {
		if wait.GetReason() == policyv1.WaitReason_WAIT_REASON_IN_LINE {
			j.asked-- // the place in line belongs to this request id
		}
		j.earlier = nil // after a wait every target may be tried again
		if sleep(ctx, pause); ctx.Err() == nil {
			return nil
		}
	}
	if wait.Ticket != nil {
		j.withdraw(j.askedAs)
	}
	message := "no target is free before the deadline of the request"
	return failure(j.request, problem{http.StatusServiceUnavailable, wait.GetReasonText(), "service_unavailable", message, pause})
}

// reject passes a refusal on; the first one that time may cure is asked again instead. Nil: ask again.
func (j *journey) reject(reject *policyv1.Reject) *http.Response {
	status := int(reject.GetHttpStatus())
	mayPass := status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
	if mayPass && !j.patient && j.left() > 0 {
		j.patient = true
		return nil
	}
	return failure(j.request, problem{status, reject.GetCode(), reject.GetType(), reject.GetMessage(),
		milliseconds(reject.GetRetryAfterMs())})
}

// walk makes the attempts of one decision. Nil: ask again.
func (j *journey) walk(ctx context.Context, decision *policyv1.SelectTargetResponse, dispatch *policyv1.Dispatch) *http.Response {
	held := j.hold(decision)
	defer held.end() // also where something panics
	targets := append([]*policyv1.Target{dispatch.GetTarget()}, dispatch.GetFallbacks()...)
	target, headers := dispatch.GetTarget(), dispatch.GetSetHeaders()
	most := cmp.Or(int(dispatch.GetAttemptPolicy().GetMaxDispatches()), maxDispatches)
	for number := int32(0); ; number++ {
		a := &attempt{journey: j, held: held, dispatch: dispatch, number: number, target: target, headers: headers}
		if place := slices.Index(targets, target); place+1 < len(targets) {
			a.following = targets[place+1]
		}
		response, action := a.make(ctx)
		if action == nil {
			return response
		}
		if isFinal(action) || j.attempts >= most || milliseconds(action.GetDelayMs()) >= j.left() {
			return response
		}
		discard(response)
		sleep(ctx, milliseconds(action.GetDelayMs()))
		target, headers = next(action, target, targets), action.GetSetHeaders()
		if target == nil || ctx.Err() != nil {
			return nil
		}
	}
}

// next is the target of this decision that the action names; nil where a new decision is needed.
func next(action *policyv1.Action, last *policyv1.Target, targets []*policyv1.Target) *policyv1.Target {
	switch action.GetKind() {
	case policyv1.ActionKind_ACTION_KIND_RETRY_SAME:
		return last
	case policyv1.ActionKind_ACTION_KIND_FALL_BACK:
		for _, target := range targets {
			if name(target) == name(action.GetNextTarget()) {
				return target
			}
		}
	}
	return nil
}

// isFinal: the client gets what came. Also for kinds that this gateway does not know.
func isFinal(action *policyv1.Action) bool {
	switch action.GetKind() {
	case policyv1.ActionKind_ACTION_KIND_RETRY_SAME, policyv1.ActionKind_ACTION_KIND_FALL_BACK,
		policyv1.ActionKind_ACTION_KIND_WAIT_AND_SELECT:
		return false
	}
	return true
}

func name(target *policyv1.Target) string {
	return target.GetProvider() + "/" + target.GetConnection() + "/" + target.GetModel()
}

func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}
