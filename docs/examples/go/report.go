package main

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"

	"google.golang.org/protobuf/proto"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// Why a timer of the gateway ended an upstream call.
var (
	errNoAnswer  = errors.New("no answer within first_byte_timeout_ms")
	errIdle      = errors.New("silent for idle_timeout_ms")
	errOutOfTime = errors.New("the client's time is over")
)

// report is an attempt as the service wants to hear of it. Bodies travel for failures only.
func (a *attempt) report(r *result, isFinal bool) *policyv1.ReportOutcomeRequest {
	report := &policyv1.ReportOutcomeRequest{
		DecisionToken:   a.held.token,
		Attempt:         a.number,
		Target:          a.target,
		AttemptOffsetMs: proto.Int64(a.offset.Milliseconds()),
		Final:           isFinal,
		LatencyMs:       proto.Int64(r.took.Milliseconds()),
		Streamed:        r.isStream,
		BytesStreamed:   r.bytes,
	}
	if r.response != nil {
		report.Headers = headersOf(r.response.Header)
		report.FirstByteMs = proto.Int64(r.firstByte.Milliseconds())
	}
	switch {
	case r.cancelled:
		report.Outcome = &policyv1.ReportOutcomeRequest_ClientCancelled{ClientCancelled: &policyv1.ClientCancel{}}
		report.Origin = policyv1.Origin_ORIGIN_CLIENT
	case r.local != 0:
		report.Outcome = &policyv1.ReportOutcomeRequest_LocalFault{LocalFault: &policyv1.LocalFault{Kind: r.local}}
		report.Origin = policyv1.Origin_ORIGIN_GATEWAY
	case r.broken != nil:
		report.Outcome = &policyv1.ReportOutcomeRequest_NetworkError{NetworkError: r.network}
		report.NetworkErrorText = r.broken.Error()
		report.Origin = policyv1.Origin_ORIGIN_TRANSPORT
	default:
		report.Outcome = &policyv1.ReportOutcomeRequest_HttpStatus{HttpStatus: int32(r.response.StatusCode)}
		report.Origin = policyv1.Origin_ORIGIN_UPSTREAM
		if r.streamError != nil {
			report.Details = &policyv1.ReportDetails{StreamError: r.streamError}
		} else if r.failed {
			report.Body = r.head
		}
	}
	return report
}

func headersOf(headers http.Header) []*policyv1.Header {
	var list []*policyv1.Header
	for name, values := range headers {
		if name == "Set-Cookie" {
			continue
		}
		for _, value := range values {
			list = append(list, &policyv1.Header{Name: name, Value: strings.ToValidUTF8(value, "?")})
		}
	}
	return list
}

// earlierAttempt is what the next SelectTarget of this client request is told about a failure.
func earlierAttempt(target *policyv1.Target, r *result, verdict *policyv1.Verdict) *policyv1.EarlierAttempt {
	attempt := &policyv1.EarlierAttempt{
		Target: target, Reason: verdict.GetReasonText(), Scope: verdict.GetScopeText(), Kind: verdict.GetFailureKindText(),
	}
	if verdict != nil {
		attempt.RetryHintMs = verdict.RetryAfterMs
	}
	if r.response != nil && r.broken == nil {
		attempt.HttpStatus = proto.Int32(int32(r.response.StatusCode))
	}
	return attempt
}

// text is the outcome in a word, for the log.
func (r *result) text() string {
	switch {
	case r.missing != "":
		return "no upstream " + r.missing
	case r.local != 0:
		return r.local.String()
	case r.broken != nil:
		return r.network.String()
	case r.streamError != nil:
		return "error in a stream"
	}
	return r.response.Status
}

// networkErrorOf names a failure of the network as the contract does. `cause` is the timer that ended the call, if one did.
func networkErrorOf(cause, err error, inStream bool) policyv1.NetworkErrorKind {
	var dns *net.DNSError
	var dial *net.OpError
	var timeout net.Error
	var certificate *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	switch {
	case cause == errIdle && inStream:
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_STREAM_IDLE_TIMEOUT
	case cause == errNoAnswer && inStream:
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_STREAM_READINESS_TIMEOUT
	case cause == errIdle || cause == errNoAnswer || cause == errOutOfTime:
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_READ_TIMEOUT
	case errors.As(err, &dns):
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_DNS
	case errors.Is(err, syscall.ECONNREFUSED):
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_CONNECT_REFUSED
	case errors.As(err, &certificate) || errors.As(err, &record) || strings.Contains(err.Error(), "tls: "):
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_TLS
	case errors.As(err, &dial) && dial.Op == "dial" && dial.Timeout():
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_CONNECT_TIMEOUT
	case errors.As(err, &timeout) && timeout.Timeout():
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_READ_TIMEOUT
	case inStream:
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_STREAM_EARLY_EOF
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_CONNECTION_RESET
	case strings.Contains(err.Error(), "malformed HTTP"):
		return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_PROTOCOL_ERROR
	}
	return policyv1.NetworkErrorKind_NETWORK_ERROR_KIND_UNSPECIFIED
}
