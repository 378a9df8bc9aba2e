package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// Transport is an http.RoundTripper that sends each request where the policy service says, and falls back until there is an
// answer. Behind a ReverseProxy it is a gateway; as the Transport of an http.Client it serves one program.
type Transport struct {
	config   *Config
	service  *Service
	upstream http.RoundTripper
	memory   *memory
	outbox   *outbox
	serving  atomic.Int64 // requests of the handler under way
}

// NewTransport returns a Transport with a connection pool of its own for upstreams.
func NewTransport(config *Config, service *Service) *Transport {
	dialer := &net.Dialer{Timeout: 5 * time.Second}
	upstream := &http.Transport{
		DialContext:         dialer.DialContext,
		TLSHandshakeTimeout: 5 * time.Second,
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: 100,
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true, // the service reads error bodies as they come
	}
	return &Transport{config: config, service: service, upstream: upstream, memory: newMemory(), outbox: newOutbox(config.Policy.Address)}
}

// RoundTrip serves one client request. An error means that the client has left.
func (t *Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	j, refusal := t.begin(request)
	if refusal != nil {
		return refusal, nil
	}
	return j.run(request.Context())
}

// Close waits until the requests under way have ended and their reports are out.
func (t *Transport) Close(ctx context.Context) error {
	for t.serving.Load() > 0 && ctx.Err() == nil {
		sleep(ctx, 10*time.Millisecond)
	}
	t.outbox.close(ctx)
	return t.service.connection.Close()
}

// NewHandler serves the OpenAI paths through the transport. ReverseProxy streams, copies trailers, drops hop-by-hop headers,
// and cancels the request to the transport when the client leaves.
func NewHandler(transport *Transport) http.Handler {
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		FlushInterval: -1, // every chunk at once
		Rewrite:       func(*httputil.ProxyRequest) {},
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(499) }, // nobody reads it
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/", func(w http.ResponseWriter, request *http.Request) {
		if slices.Contains(strings.Split(request.URL.Path, "/"), "..") { // escaped, else the mux has seen to it
			http.NotFound(w, request)
			return
		}
		transport.serving.Add(1)
		defer transport.serving.Add(-1)
		request.Body = newTimedBody(w, request.Body, milliseconds(transport.config.RequestTimeoutMs))
		proxy.ServeHTTP(w, request)
	})
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	return mux
}

// timedBody ends the reading of a request whose client is too slow in sending it.
type timedBody struct {
	io.ReadCloser
	connection *http.ResponseController
}

func newTimedBody(w http.ResponseWriter, body io.ReadCloser, longest time.Duration) io.ReadCloser {
	timed := &timedBody{body, http.NewResponseController(w)}
	_ = timed.connection.SetReadDeadline(time.Now().Add(longest))
	return timed
}

func (b *timedBody) Read(buffer []byte) (int, error) {
	n, err := b.ReadCloser.Read(buffer)
	if err == io.EOF {
		_ = b.connection.SetReadDeadline(time.Time{}) // from now on it is for noticing that the client leaves
	}
	return n, err
}

// gatewaysOwn are headers that end here: the client's credential, and what the gateway or its connections make themselves.
var gatewaysOwn = []string{
	"Authorization", "X-Api-Key", "Api-Key", "Cookie", "Accept-Encoding", "Content-Length", "Connection", "Upgrade", "Expect",
	"X-Real-Ip",
}

// forUpstream is the client's request as one attempt sends it: with the target's model and credential, without the headers of
// the policy.
func (j *journey) forUpstream(ctx context.Context, target *policyv1.Target, upstream Upstream, wishes wishes) *http.Request {
	out := j.request.Clone(ctx)
	query := out.URL.RawQuery
	out.URL = upstream.base.JoinPath(out.URL.EscapedPath())
	out.URL.RawQuery, out.Host = query, ""
	for name := range out.Header {
		lower := strings.ToLower(name)
		if strings.HasPrefix(lower, "x-policy-") || strings.HasPrefix(lower, "x-omniroute-") {
			delete(out.Header, name)
		}
	}
	for _, name := range slices.Concat(gatewaysOwn, wishes.strip) {
		out.Header.Del(name)
	}
	for _, header := range wishes.set {
		out.Header.Set(header.GetName(), header.GetValue())
	}
	for name, value := range upstream.Headers {
		out.Header.Set(name, value)
	}
	body := j.bodyFor(target.GetModel(), wishes.degradations)
	// Both let the connection pool send the request anew where a connection of it turns out to be closed.
	if _, given := out.Header["Idempotency-Key"]; !given {
		out.Header["Idempotency-Key"] = nil // is not sent
	}
	out.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	out.Body, _ = out.GetBody()
	out.ContentLength, out.TransferEncoding = int64(len(body)), nil
	return out
}

// bodyFor is the client's body with the model of the target, and with no more tools than the target takes.
func (j *journey) bodyFor(model string, degradations []*policyv1.Degradation) []byte {
	body := maps.Clone(j.body)
	if model != "" {
		body["model"], _ = json.Marshal(model)
	}
	for _, degradation := range degradations {
		var tools []json.RawMessage
		if degradation.ToolLimit != nil && json.Unmarshal(body["tools"], &tools) == nil {
			body["tools"], _ = json.Marshal(tools[:min(len(tools), int(degradation.GetToolLimit()))])
		}
	}
	text, _ := json.Marshal(body)
	return text
}
