"""The caller's trace context of the call under way, set by the transport only while tracing is on."""

from __future__ import annotations

from contextvars import ContextVar

TRACE_HEADERS: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
"""`traceparent`, `tracestate` and `baggage` as received; None: the caller sent none."""

PROPAGATED = ("traceparent", "tracestate", "baggage")
"""W3C Trace Context header names that a transport copies."""
