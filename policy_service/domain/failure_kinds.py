"""Kind of a failure where failures of one request are aggregated (spec/diagnostics.md section 4). Pure."""

from __future__ import annotations

_BY_REASON = {
    "quota_exhausted": "quota",
    "rate_limit": "quota",
    "auth_error": "auth",
    "model_not_found": "model",
    "model_access_denied": "model",
    "context_overflow": "model",
    "content_policy": "model",
    "client_error": "model",
}
_BY_STATUS = {
    429: "quota",
    401: "auth",
    402: "auth",
    403: "auth",
    400: "model",
    404: "model",
    413: "model",
    422: "model",
    408: "timeout",
    504: "timeout",
    524: "timeout",
}


def failure_kind(status: int | None, reason: str) -> str:
    """`quota`, `auth`, `model`, `timeout` or `upstream`; empty where the failure is none of the upstream's.

    The meaning of the outcome decides where it says more than the status.

    Args:
        status: restated HTTP status.
        reason: public reason of the verdict.
    """
    by_reason = _BY_REASON.get(reason)
    if by_reason is not None:
        return by_reason
    by_status = _BY_STATUS.get(status or 0)
    if by_status is not None:
        return by_status
    return "upstream" if status is not None and status >= 500 else ""
