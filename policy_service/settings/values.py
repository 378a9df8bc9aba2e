"""What a written value of a policy setting may be: refused, never clamped (spec/operator_surface.md section 3)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from zoneinfo import ZoneInfo

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.settings import REGISTRY, SettingSpec
from policy_service.settings.problems import Problem, did_you_mean, shown

MAX_TEXT = 4_096
MAX_LIST = 10_000
_MAX_BAN_SIGNAL = 200


def refuse(spec: SettingSpec, value: object, path: str) -> Problem | None:
    """Why `value` may not be written for a setting; None where it may. `path` is the name to show."""
    if not _TYPES[spec.kind](value):
        return Problem(path, "wrong type", shown(value), allowed(spec), _retype(spec, value))
    reason = next(iter(_beyond(spec, value)), None)
    if reason is None:
        return None
    return Problem(path, reason, shown(value), allowed(spec), "correct the value, or null to take it back")


def allowed(spec: SettingSpec) -> str:
    """Type and range of a setting, in words."""
    words = {"int": "whole number", "float": "number", "bool": "true or false", "text": "text"}
    words |= {"int_list": "list of whole numbers", "text_list": "list of texts", "choice": "one of"}
    limits = f"{spec.low:.15g} .. {spec.high:.15g}" if spec.low is not None and spec.high is not None else ""
    detail = ", ".join(spec.choices) or limits
    return f"{words[spec.kind]} {detail}".strip()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(check, value))


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "bool": lambda value: isinstance(value, bool),
    "choice": _is_text,
    "text": _is_text,
    "int_list": _list_of(_is_int),
    "text_list": _list_of(_is_text),
}


def _beyond(spec: SettingSpec, value: object) -> Iterator[str]:
    if spec.choices and value not in spec.choices:
        yield "not one of the allowed values"
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, (int, float)) and _outside(spec, item):
            yield "out of range"
        if isinstance(item, str) and len(item) > MAX_TEXT:
            yield f"text longer than {MAX_TEXT} characters"
    if isinstance(value, (list, tuple)) and len(value) > MAX_LIST:
        yield f"more than {MAX_LIST} entries"
    yield from _PARTICULAR.get(spec.name, _nothing)(value)


def _outside(spec: SettingSpec, number: float) -> bool:
    return (spec.low is not None and number < spec.low) or (spec.high is not None and number > spec.high)


def _nothing(_: object) -> Iterator[str]:
    return iter(())


def _long_signals(value: object) -> Iterator[str]:
    if isinstance(value, (list, tuple)) and any(len(str(item)) > _MAX_BAN_SIGNAL for item in value):
        yield f"a signal is longer than {_MAX_BAN_SIGNAL} characters"


def bad_zone(value: object) -> Iterator[str]:
    """`not an IANA time zone` where it is none."""
    try:
        ZoneInfo(str(value))
    except (KeyError, ValueError, OSError):
        yield "not an IANA time zone such as Europe/Berlin"


_PARTICULAR: Mapping[str, Callable[[object], Iterator[str]]] = {
    "terminal.custom_ban_signals": _long_signals,
    "daily_reset_zone": bad_zone,
}


_PLAIN = re.compile(r"\s*(-?[0-9]+|true|false)\s*", re.IGNORECASE)


def _retype(spec: SettingSpec, value: object) -> str:
    if spec.kind in ("int", "bool") and isinstance(value, str) and _PLAIN.fullmatch(value):
        return "write it without quotes"
    if spec.kind in ("text", "choice"):
        return "write one text with commas" if isinstance(value, (list, tuple)) else "put it in quotes"
    return "write a whole number" if spec.kind == "int" else "correct the value, or null to take it back"


def unknown_setting(name: str, path: str) -> Problem:
    """A name that is no policy setting."""
    hint = did_you_mean(name, REGISTRY) or "see `policy-service config docs` for every name"
    return Problem(path, "unknown setting", shown(name), "names of policy settings", hint)
