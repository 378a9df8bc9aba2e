"""Runs the vectors of spec/watchdog.md: the state machine, its settings, and the reading of events."""

from __future__ import annotations

from typing import Any

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.settings import SettingSources
from policy_service.domain.stream_events import EventSplitter, read_event
from policy_service.domain.watchdog import (
    ABORT_CODE,
    ABORT_REASON,
    START,
    Verdict,
    WatchdogSettings,
    WatchState,
    observe,
)
from policy_service.settings.patch import patch
from policy_service.settings.problems import ConfigError
from tests.vectors.harness import Vector
from tests.vectors.matching import assert_expected

Fields = dict[str, Any]


class _Stream:
    """One watched stream: the attempt, or the reader, may change under it."""

    def __init__(self, given: Fields) -> None:
        self._settings = WatchdogSettings(**{"enabled": True, **given})
        self._state: WatchState = START

    def step(self, step: Fields) -> Fields:
        if step["event"] != "observe":
            self._state = START
            return {}
        now, useful_bytes, protected = step["at_ms"], step["useful_bytes"], step["protected"]
        self._state, verdict = observe(self._state, useful_bytes, protected, now, self._settings)
        told = {"reason": ABORT_REASON, "error": ABORT_CODE} if verdict is Verdict.ABORT else {}
        return {"verdict": verdict, "bytes": self._state.window_bytes, "protected": self._state.protected} | told


def _stored(stored: Fields) -> Fields:
    sources = SettingSources({f"stream_watchdog.{name}": value for name, value in stored.items()}, {})
    return {name: sources.resolve(f"stream_watchdog.{name}") for name in WatchdogSettings._fields}


def _patched(body: Fields) -> Fields:
    try:
        patch({}, body)
    except ConfigError as error:
        return {"http_status": 400, "paths": [problem.path for problem in error.problems]}
    return {"http_status": 200}


def _analysed(given: Fields) -> Fields:
    splitter = EventSplitter()
    chunks = given.get("chunks") or [given["sse"]]
    events = [event for chunk in chunks for event in splitter.feed(chunk.encode())]
    readings = [read_event(given["format"], event) for event in events]
    return {
        "events": [[reading.useful_bytes, reading.protected] for reading in readings],
        "tail": splitter.tail.decode(),
    }


def run(vector: Vector) -> None:
    """Raise AssertionError where an answer differs."""
    given: Fields = vector["given"]
    answer: Fields = {}
    if "stored" in given:
        answer = _stored(given["stored"] or {})
    elif "patch" in given:
        answer = _patched(given["patch"])
    elif "format" in given:
        answer = _analysed(given)
    else:
        stream = _Stream(given.get("settings") or {})
        for step in vector["steps"]:
            answer = stream.step(step)
            assert_expected(step.get("expect", {}), answer, f"at {step['at_ms']}")
    assert_expected(vector["expect"], answer, "result")
