"""Tables for the parsing of outcomes: error kinds and network failures with the status each stands for.

Data only. Kinds are the structured types and codes of error objects, compared in lower case; network failures
are recognised by words in what the gateway's HTTP client reports.
"""

from __future__ import annotations

from typing import NamedTuple

from policy_service.domain.outcome import Origin

_KINDS_OF = {
    400: "invalid_request_error bad_request_error badrequesterror bad_request context_length_exceeded "
    "exceed_context_size_error context_window_exceeded invalid_argument failed_precondition out_of_range "
    "validationexception invalid_prompt content_filter content_policy_violation invalid_parameter badrequest "
    "invalidparameter invalid_value unsupported_value unsupported_parameter data_inspection_failed "
    "datainspectionfailed sensitivecontentdetected operationnotsupported",
    401: "authentication_error unauthenticated unauthorized invalid_api_key unrecognizedclientexception "
    "expiredtokenexception token_expired token_invalidated token_revoked invalid_token invalid_grant invalid_client "
    "invalid_authentication_error invalidapikey authfailure",
    402: "billing_error payment_required credits_exhausted insufficient_balance",
    403: "permission_error permission_denied permission-denied forbidden accessdeniedexception access_denied",
    404: "not_found_error not_found notfounderror model_not_found resourcenotfoundexception "
    "deploymentnotfound invalid_model",
    408: "request_timeout",
    409: "conflict_error already_exists conflictexception",
    413: "request_too_large payload_too_large",
    429: "rate_limit_error rate_limit_exceeded rate_limited rate_limit_reached_error ratelimiterror tokens requests "
    "resource_exhausted insufficient_quota usage_limit_reached quota_exceeded too_many_requests toomanyrequests "
    "throttlingexception throttling throttled servicequotaexceededexception limitexceededexception "
    "usage_not_included slow_down too_many_tokens_error too_many_requests_error ratelimitreached "
    "requestlimitexceeded",
    499: "cancelled",
    500: "api_error server_error internal_error internal_server_error internal internalservererror unknown "
    "internalserverexception internalfailure modelerrorexception modelstreamerrorexception",
    503: "service_unavailable service_unavailable_error unavailable serviceunavailableexception modelnotreadyexception",
    504: "timeout_error deadline_exceeded modeltimeoutexception gateway_timeout timeout",
    529: "overloaded_error overloaded engine_overloaded_error server_is_overloaded",
}
STATUS_OF_KIND: dict[str, int] = {kind: status for status, kinds in _KINDS_OF.items() for kind in kinds.split()}
"""Structured type or code in lower case -> the HTTP status that it stands for."""

UNKNOWN_KIND_STATUS = 500
"""Status of an error inside a 200 whose kind nobody knows."""


class NetworkFailure(NamedTuple):
    """A group of transport failures: words that tell it, its status and code, who made it."""

    words: tuple[str, ...]
    status: int
    code: str
    origin: Origin = Origin.TRANSPORT
    name: str = ""


NETWORK_FAILURES = (
    NetworkFailure(
        ("aborterror", "client disconnect", "client abort", "client_abort", "client closed", "request_signal_aborted",
         "request signal aborted", "operation was aborted", "und_err_aborted", "abort_err", "context canceled",
         "user aborted", "request was aborted", "cancellederror", "cancelederror", "err_canceled"),
        499, "client_abort", Origin.CLIENT, "AbortError",
    ),
    NetworkFailure(("enoent",), 502, "ENOENT", Origin.GATEWAY),
    NetworkFailure(("eacces",), 502, "EACCES", Origin.GATEWAY),
    NetworkFailure(
        ("cert", "self_signed", "self signed", "unable_to_verify", "unable_to_get_issuer", "tls", "ssl", "handshake"),
        502, "tls_error",
    ),
    NetworkFailure(
        ("connect timeout", "connect_timeout", "connecttimeout", "und_err_connect_timeout", "etimedout (connect)",
         "connection timed out"),
        504, "connect_timeout",
    ),
    NetworkFailure(("stream_readiness_timeout",), 504, "STREAM_READINESS_TIMEOUT"),
    NetworkFailure(("stream_too_slow", "throughput_too_low"), 504, "STREAM_THROUGHPUT_TOO_LOW"),
    NetworkFailure(("timeout", "timed out", "timedout", "deadline exceeded", "deadline_exceeded"), 504, "timeout"),
    NetworkFailure(
        ("proxy_unreachable", "proxy unreachable", "refused", "enotfound", "eai_again", "getaddrinfo", "dns",
         "no such host", "name resolution", "name or service not known", "unreach", "no route", "connect error",
         "connecterror", "eaddrnotavail", "enetdown", "ehostdown"),
        502, "proxy_unreachable",
    ),
    NetworkFailure(
        ("reset", "epipe", "broken pipe", "premature", "closed", "terminated", "hang up", "eof", "stream_error",
         "stream error", "goaway", "incomplete", "disconnected"),
        502, "connection_reset",
    ),
)  # fmt: skip
"""First group with a word in the report wins; the order settles the overlaps."""

OTHER_NETWORK_FAILURE = NetworkFailure((), 502, "network_error")
