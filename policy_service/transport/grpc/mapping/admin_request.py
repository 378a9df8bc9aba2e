"""Requests of AdminService, read for the use cases; all findings of a bad request at once."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from policy_service.application.admin import Actor
from policy_service.application.messages import ReportRequest
from policy_service.domain.cooldown import RecoveryView
from policy_service.generated.policy.v1 import admin_pb2, policy_pb2
from policy_service.transport.grpc.admin_servicer import actor_name
from policy_service.transport.grpc.limits import Problems
from policy_service.transport.grpc.mapping.reading import Reading, optional, struct_fields
from policy_service.transport.grpc.mapping.report_request import report_request
from policy_service.transport.grpc.wire_enums import BREAKER_CONTROL, RESET_SCOPE

MAX_NOTE_CHARS = 1_024
MAX_SCOPES = 100
MAX_PROVIDERS = 1_000
MAX_INSTANT = 2**53 - 1
MAX_PERMIT_CHARS = 2_048
_CONTROLS = {"": "clear_override", "force_open": "force_open", "disable": "disable", "reset": "reset"}


def actor(message: admin_pb2.Actor, problems: Problems) -> Actor:
    """Who acts."""
    problems.text("actor.name", message.name)
    problems.text("actor.note", message.note, MAX_NOTE_CHARS)
    return Actor(actor_name(message), message.note)


def ids(message: Any, *names: str) -> Problems:
    """Check text fields; the findings so far."""
    problems = Problems()
    for name in names:
        problems.text(name, getattr(message, name))
    return problems


def needs(message: Any, problems: Problems, *names: str) -> None:
    """Note which of the fields are empty."""
    for name in names:
        if not getattr(message, name):
            problems.require(name, "missing", "name it")


def breaker_control(message: admin_pb2.SetBreakerControlRequest, problems: Problems) -> str:
    """Control by name; the findings say what does not fit together."""
    control = _CONTROLS.get(BREAKER_CONTROL.text(message.control), "")
    if message.control not in BREAKER_CONTROL.texts:
        problems.add("control", f"unknown control {message.control}", "a value of BreakerControl")
    if message.all and control != "reset":
        problems.add("control", "every breaker at once can only be reset", "RESET, or name one key")
    if message.all and message.key:
        problems.add("key", "set together with all", "one of the two")
    if not message.all and not message.key.strip():
        problems.require("key", "missing", "a provider, or <provider>::conn::<connection>")
    return control


def reset_scopes(message: admin_pb2.ResetStateRequest, problems: Problems) -> list[str]:
    """Scopes by name; none means breakers."""
    problems.count("scopes", len(message.scopes), MAX_SCOPES)
    known = ", ".join(text for text in RESET_SCOPE.texts.values() if text)
    for index, number in enumerate(message.scopes):
        if not RESET_SCOPE.text(number):
            problems.add(f"scopes[{index}]", f"unknown scope {number}", f"one of {known}")
    return [RESET_SCOPE.text(number) for number in message.scopes] or ["breakers"]


def connection_seen(message: admin_pb2.ResetStateRequest, scopes: list[str], problems: Problems) -> RecoveryView | None:
    """What a recovery job saw; None for an ordinary reset."""
    if not message.HasField("if_still"):
        return None
    needs(message, problems, "provider", "connection")
    if scopes != ["connection_cooldowns"]:
        problems.add("scopes", "more than the timer of one connection", "connection_cooldowns alone")
    seen = message.if_still
    error_at, until = optional(seen, "last_error_at_unix_ms"), optional(seen, "rate_limited_until_unix_ms")
    problems.text("if_still.test_status", seen.test_status)
    return RecoveryView(seen.test_status, error_at, until)


def page_size(given: int, default: int, largest: int, problems: Problems) -> int:
    """Rows wanted."""
    problems.between("page_size", given or default, 1, largest)
    return given or default


def fact_token(token: str, problems: Problems) -> int | None:
    """Place in the facts; None from the newest."""
    if token and not (token.isascii() and token.isdigit() and len(token) < 19):
        problems.add("page_token", "not a token of ListFacts", "next_page_token of the last answer")
        return None
    return int(token) if token else None


def write_place(place: tuple[str, str, str] | None) -> str:
    """Place in the listing of state as a token; empty where there is no next page."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode() if place else ""


def read_place(token: str, problems: Problems) -> tuple[str, str, str] | None:
    """Place of a token."""
    if not token:
        return None
    try:
        provider, mechanism, key = json.loads(base64.urlsafe_b64decode(token.encode()))
        return str(provider), str(mechanism), str(key)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        problems.add("page_token", "not a token of ListState", "next_page_token of the last answer")
        return None


def instant(message: Any, name: str, problems: Problems) -> int | None:
    """An instant with presence."""
    value: int | None = getattr(message, name) if message.HasField(name) else None
    problems.between(name, value, 0, MAX_INSTANT)
    return value


def patch_body(message: admin_pb2.PatchSettingsRequest, problems: Problems) -> object:
    """The patch as JSON has it; Struct knows one kind of number, so whole ones are integers here."""
    if not message.HasField("patch"):
        problems.require("patch", "missing", "new values by name")
        return {}
    return _whole(struct_fields(message.patch, "patch", problems))


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def classified(message: admin_pb2.ClassifyOutcomeRequest, reading: Reading) -> ReportRequest:
    """The outcome to judge, freed of token, ids and times.

    Raises:
        InvalidRequestError: with every wrong field.
    """
    outcome = policy_pb2.ReportOutcomeRequest()
    outcome.CopyFrom(message.outcome)
    for name in ("decision_token", "elapsed_ms", "attempt_offset_ms", "attempt", "latency_ms", "first_byte_ms"):
        outcome.ClearField(name)
    outcome.report_id = "classify"
    return report_request(outcome, reading)
