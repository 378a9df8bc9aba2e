package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// maxHeadBytes is as much of an answer as is looked at before it goes to the client, and as much as a report may carry.
const maxHeadBytes = 64 << 10

// result is what one upstream call brought.
type result struct {
	response    *http.Response // nil: no answer came
	body        io.ReadCloser  // its body as it comes from upstream
	head        []byte         // what has been read of it
	isStream    bool
	failed      bool
	streamError []byte // error event met in a stream

	cancelled bool                    // the client has left
	local     policyv1.LocalFaultKind // the gateway itself failed
	missing   string                  // the upstream that its configuration lacks
	broken    error                   // the network failed, before or after the response began
	network   policyv1.NetworkErrorKind

	sent      time.Time
	firstByte time.Duration
	took      time.Duration
	bytes     int64
	ctx       context.Context // of this call; its cause says which timer ended it
	cancel    context.CancelCauseFunc
}

// wishes are what a decision says about a call besides its target.
type wishes struct {
	timeout      time.Duration // 0: the gateway's own
	set          []*policyv1.Header
	strip        []string
	degradations []*policyv1.Degradation
}

// call makes one upstream call and reads the beginning of the answer: an error hidden in a 200 is still a failure while
// nothing of it has reached the client.
func (j *journey) call(ctx context.Context, target *policyv1.Target, wishes wishes) *result {
	j.attempts++
	r := &result{sent: time.Now(), failed: true}
	key := target.GetProvider() + "/" + target.GetConnection()
	upstream, found := j.config.Upstreams[key]
	if !found {
		r.local, r.missing = policyv1.LocalFaultKind_LOCAL_FAULT_KIND_EXECUTION, key
		slog.Error(fmt.Sprintf("no upstream %s in %s: add it", key, j.config.path))
		return r
	}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	limit, cause := j.firstByteLimit(wishes.timeout)
	timer := time.AfterFunc(limit, func() { r.cancel(cause) })
	defer timer.Stop()
	response, err := j.upstream.RoundTrip(j.forUpstream(r.ctx, target, upstream, wishes))
	r.firstByte = time.Since(r.sent)
	if err != nil {
		r.fail(err)
		return r
	}
	r.begin(response)
	return r
}

// firstByteLimit is how long an attempt may be silent at first, and what its end then means.
func (j *journey) firstByteLimit(targetTimeout time.Duration) (time.Duration, error) {
	limit := milliseconds(j.config.FirstByteTimeoutMs)
	if targetTimeout > 0 {
		limit = min(limit, targetTimeout)
	}
	if left := j.left(); left < limit {
		return left, errOutOfTime
	}
	return limit, errNoAnswer
}

// begin reads the head of the answer: of a stream the first event, of anything else as much as fits.
func (r *result) begin(response *http.Response) {
	r.response, r.body = response, response.Body
	r.isStream = isEventStream(response.Header)
	events := &eventScanner{}
	buffer, whole := make([]byte, maxHeadBytes), false
	for len(r.head) < maxHeadBytes && !whole && !(r.isStream && events.seen > 0) {
		n, err := r.body.Read(buffer[:maxHeadBytes-len(r.head)])
		r.head = append(r.head, buffer[:n]...)
		events.Write(buffer[:n])
		if whole = err == io.EOF; err != nil && !whole {
			r.fail(err)
			return
		}
	}
	if r.isStream {
		r.streamError = events.failure
	}
	isSuccess := response.StatusCode/100 == 2
	r.failed = !isSuccess || r.streamError != nil || (whole && hidesFailure(r.head, r.isStream))
	r.took = time.Since(r.sent)
}

// fail notes a network failure, or the end that a timer of the gateway made.
func (r *result) fail(err error) {
	r.took = time.Since(r.sent)
	r.failed = true
	r.broken = err
	r.network = networkErrorOf(context.Cause(r.ctx), err, r.response != nil && r.isStream)
	if context.Cause(r.ctx) == errOutOfTime {
		r.local = policyv1.LocalFaultKind_LOCAL_FAULT_KIND_OWN_TIMEOUT
	}
	r.close()
}

func (r *result) close() {
	if r.body != nil {
		r.body.Close()
	}
	if r.cancel != nil {
		r.cancel(nil)
	}
}

// stream hands a success to the client; `finish` is called once, when its body has ended in whatever way.
func (r *result) stream(ctx context.Context, idle time.Duration, finish func(*result)) *http.Response {
	r.response.Body = newWatchedBody(ctx, r, idle, finish)
	return r.response
}

// forClient is a failure as the client gets it: with the status that the service has put right, and its Retry-After.
func (r *result) forClient(request *http.Request, verdict *policyv1.Verdict) *http.Response {
	if r.response == nil || r.broken != nil {
		return failure(request, r.gatewayProblem())
	}
	if verdict.GetRestatedStatus() != 0 {
		r.response.StatusCode = int(verdict.GetRestatedStatus())
	}
	if wait := verdict.GetRetryAfterMs(); wait > 0 {
		r.response.Header.Set("Retry-After", strconv.FormatInt(seconds(milliseconds(wait)), 10))
	}
	r.response.Body = &joinedBody{io.MultiReader(bytes.NewReader(r.head), r.body), r}
	return r.response
}

func (r *result) gatewayProblem() problem {
	if r.missing != "" {
		return problem{http.StatusBadGateway, "upstream_not_configured", "server_error",
			"the configuration of the gateway has no upstream " + r.missing, 0}
	}
	if r.local == policyv1.LocalFaultKind_LOCAL_FAULT_KIND_OWN_TIMEOUT {
		return problem{http.StatusGatewayTimeout, "timeout", "server_error", "no answer in time", 0}
	}
	return problem{http.StatusBadGateway, "upstream_unreachable", "server_error", "the upstream gave no usable answer", 0}
}

// isWorthAnother: another account may do better. Asked only while the service is away.
func (r *result) isWorthAnother() bool {
	if r.response == nil || r.broken != nil {
		return r.local != policyv1.LocalFaultKind_LOCAL_FAULT_KIND_OWN_TIMEOUT
	}
	switch r.response.StatusCode {
	case 200, 401, 402, 403, 404, 408, 429:
		return true
	}
	return r.response.StatusCode >= 500
}

// joinedBody is a body whose beginning has been read already.
type joinedBody struct {
	io.Reader
	result *result
}

func (b *joinedBody) Close() error {
	b.result.close()
	return nil
}
