"""Modules of the pure core by the part of the behaviour they hold; each group is held to the gate on its own."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "breaker": ("breaker*",),
    "connection": ("cooldown", "terminal", "connection_state", "daily_reset"),
    "lockout": ("lockout*",),
    "egress": ("egress",),
    "classification": (
        "classification*", "signals/*", "error_types", "error_kinds", "guards", "rules", "rule_linter", "verdict*",
        "success_faults", "reading", "failure_kinds",
    ),
    "retry hints": ("retry_*", "limit_reset"),
    "restatement": ("restatement",),
    "outcome": ("outcome*", "error_object", "stream_errors"),
    "provider cooldown": ("provider_cooldown",),
    "pool guard and early probe": ("pool_guard", "early_probe"),
    "eligibility": (
        "eligibility", "exclusions", "gates", "terminal_answer", "cooldown_wait", "request_exhaustion", "inflight",
        "decision_record",
    ),
    "settings and catalogue": ("settings", "setting_specs", "policy", "profiles", "catalogue", "facts", "ids", "state"),
    "strategies": ("strategies/*", "quota_share", "stickiness"),
    "leases and affinity": ("lease*", "affinity", "session_key"),
    "permits and queue": ("permits", "queue*", "line", "rate_*"),
    "usage wall": ("usage_wall*",),
    "streams": ("watchdog", "stream_events"),
}  # fmt: skip
