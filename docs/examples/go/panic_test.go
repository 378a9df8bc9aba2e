package main

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// policy dispatches to one target with a permit, and tells what it hears.
type policy struct {
	policyv1.PolicyServiceClient
	ended chan string
}

func (p *policy) SelectTarget(
	context.Context, *policyv1.SelectTargetRequest, ...grpc.CallOption,
) (*policyv1.SelectTargetResponse, error) {
	return &policyv1.SelectTargetResponse{DecidedAtUnixMs: 1, Verdict: &policyv1.SelectTargetResponse_Dispatch{
		Dispatch: &policyv1.Dispatch{
			Target:  &policyv1.Target{Provider: "house", Connection: "only"},
			Permits: []*policyv1.Permit{{PermitId: "slot", ExpiresAtUnixMs: 60_001}},
		}}}, nil
}

func (p *policy) ReleasePermit(
	context.Context, *policyv1.ReleasePermitRequest, ...grpc.CallOption,
) (*policyv1.ReleasePermitResponse, error) {
	p.ended <- "released"
	return nil, nil
}

func (p *policy) ReportOutcome(
	_ context.Context, report *policyv1.ReportOutcomeRequest, _ ...grpc.CallOption,
) (*policyv1.ReportOutcomeResponse, error) {
	if report.GetFinal() {
		p.ended <- "reported"
	}
	return nil, nil
}

// upstream panics at once, or in the middle of its answer.
type upstream struct{ answer *http.Response }

func (u upstream) RoundTrip(*http.Request) (*http.Response, error) {
	if u.answer == nil {
		panic("at once")
	}
	return u.answer, nil
}

type bursting struct{ io.Reader }

func (b bursting) Read(buffer []byte) (int, error) {
	n, err := b.Reader.Read(buffer)
	if err == io.EOF {
		panic("in the middle")
	}
	return n, err
}

func TestPermitsAreFreedWhereSomethingPanics(t *testing.T) {
	answer := &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
		Body: io.NopCloser(bursting{strings.NewReader("data: {}\n\n")}),
	}
	for wanted, from := range map[string]upstream{"released": {}, "reported": {answer}} {
		heard := &policy{ended: make(chan string, 1)}
		if !panics(t, heard, from) {
			t.Fatal("nothing panicked")
		}
		select {
		case ended := <-heard.ended:
			if ended != wanted {
				t.Errorf("%s, not %s", ended, wanted)
			}
		case <-time.After(5 * time.Second):
			t.Errorf("not %s", wanted)
		}
	}
}

func panics(t *testing.T, heard *policy, from upstream) (isSo bool) {
	defer func() { isSo = recover() != nil }()
	config := &Config{
		RequestTimeoutMs: 10_000, FirstByteTimeoutMs: 10_000, IdleTimeoutMs: 10_000,
		Upstreams: map[string]Upstream{"house/only": {BaseURL: "http://only/"}},
		Policy:    PolicyConfig{Address: "127.0.0.1:1", SelectTimeoutMs: 1_000, ReportTimeoutMs: 1_000},
		FailMode:  "closed", DrainMs: 1,
	}
	if err := config.complete(); err != nil {
		t.Fatal(err)
	}
	transport := NewTransport(config, &Service{PolicyServiceClient: heard, config: config.Policy})
	transport.upstream = from
	request, err := http.NewRequest("POST", "http://gateway/v1/chat", strings.NewReader(`{"model": "one"}`))
	if err != nil {
		t.Fatal(err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, response.Body)
	return false
}
