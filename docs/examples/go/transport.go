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
	return &Transport{config: config, service: service, upstream: upstream, memory: newMemory(), outbox: newOutbox()}
}

// RoundTrip serves one client request. An error means that the client has left.
func (t *Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	j, refusal := t.begin(request)
	if refusal != nil {
		return refusal, nil
	}
	return j.run(request.Context())
}

// Close waits until the reports under way are out.
func (t *Transport) Close(ctx context.Context) error {
	t.outbox.wait(ctx)
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
	mux.Handle("POST /v1/", proxy)
	mux.HandleFunc("GET /healthz", func(http.ResponseWriter, *http.Request) {})
	return mux
}

// gatewaysOwn are headers that end here: the client's credential, and what the gateway makes itself.
var gatewaysOwn = []string{"Authorization", "X-Api-Key", "Api-Key", "Cookie", "Accept-Encoding", "Content-Length"}

// forUpstream is the client's request as one attempt sends it: with the target's model and credential, without the headers of
// the policy.
func (j *journey) forUpstream(ctx context.Context, target *policyv1.Target, upstream Upstream, wishes wishes) *http.Request {
	out := j.request.Clone(ctx)
	out.URL.Scheme, out.URL.Host = upstream.base.Scheme, upstream.base.Host
	out.URL.Path, out.URL.RawPath = strings.TrimSuffix(upstream.base.Path, "/")+out.URL.Path, ""
	out.Host = ""
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
	out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
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
