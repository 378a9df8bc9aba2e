package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

var errNoModel = errors.New("a JSON body with a model is needed")

// problem is an answer of the gateway itself, in the shape of OpenAI's errors.
type problem struct {
	status              int
	code, kind, message string
	retryAfter          time.Duration // 0: unknown
}

func failure(request *http.Request, p problem) *http.Response {
	body, _ := json.Marshal(map[string]any{"error": map[string]string{"message": p.message, "type": p.kind, "code": p.code}})
	response := &http.Response{
		StatusCode: p.status, ProtoMajor: 1, ProtoMinor: 1, Request: request,
		Header:        http.Header{"Content-Type": {"application/json"}},
		Body:          io.NopCloser(bytes.NewReader(body)),
		ContentLength: int64(len(body)),
	}
	if p.retryAfter > 0 {
		response.Header.Set("Retry-After", strconv.FormatInt(seconds(p.retryAfter), 10))
	}
	return response
}

// seconds rounds up: a client that comes back too early has waited for nothing.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// refused is an error of the service as the client sees it.
func refused(request *http.Request, err error) *http.Response {
	reason, code := reasonOf(err), status.Code(err)
	p := problem{http.StatusServiceUnavailable, cmp.Or(strings.ToLower(reason), "policy_unavailable"), "service_unavailable",
		"no decision can be made now", time.Second}
	switch {
	case strings.HasPrefix(reason, "LEASE_"):
		p = problem{leaseStatus[code], reason, "lease_error", status.Convert(err).Message(), 0}
	case code == codes.Unauthenticated, code == codes.PermissionDenied, code == codes.InvalidArgument:
		p = problem{http.StatusInternalServerError, "gateway_error", "server_error", "the gateway is not set up correctly", 0}
	}
	if p.status == 0 {
		p.status = http.StatusServiceUnavailable
	}
	return failure(request, p)
}

// leaseStatus: HTTP form of the lease errors.
var leaseStatus = map[codes.Code]int{
	codes.InvalidArgument:    http.StatusBadRequest,
	codes.Unauthenticated:    http.StatusUnauthorized,
	codes.PermissionDenied:   http.StatusForbidden,
	codes.FailedPrecondition: http.StatusConflict,
}

// fenceCode: the code of the contract for a fence that does not hold.
func fenceCode(status policyv1.FenceStatus) string {
	word := strings.TrimPrefix(status.String(), "FENCE_STATUS_")
	if word == "STALE" {
		word = "FENCE_STALE"
	}
	return "LEASE_" + word
}

func discard(response *http.Response) {
	if response != nil {
		response.Body.Close()
	}
}
