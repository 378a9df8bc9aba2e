"""What the vectors of a `World` may expect: the result of a step first, else the state as it then stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy_service.domain import breaker, cooldown, lockout, provider_cooldown
from policy_service.domain.breaker import BreakerState, State
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.facts import Fact
from policy_service.domain.provider_cooldown import ProviderCooldownState
from tests.vectors.rows import connection_field, is_eligible
from tests.vectors.world import World

Expect = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """What a step (or the end) offers to its expectations."""

    world: World
    now: int
    result: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    connection: str = "c1"
    replica: str = "r1"


def check(moment: Moment, expect: Expect) -> None:
    """Compare every listed key; raise AssertionError where one differs."""
    for name, wanted in expect.items():
        if name in moment.result and name != "answer":
            _same(name, moment.result[name], wanted)
        else:
            reader = READERS.get(name)
            assert reader is not None, f"unknown expectation {name}"
            reader(moment, wanted)


def _same(name: str, seen: object, wanted: object) -> None:
    assert seen == wanted, f"{name}: {seen!r} instead of {wanted!r}"


# --- breaker --------------------------------------------------------------------------------------------------
def _seen(moment: Moment, connection: str = "") -> BreakerState:
    return breaker.refresh(moment.world.breaker(connection), moment.now)


def _breaker_facts(moment: Moment) -> list[Fact]:
    return [fact for fact in moment.world.facts if fact.mechanism == breaker.MECHANISM and not fact.connection]


def _retry_after(moment: Moment) -> object:
    return breaker.retry_after_ms(moment.world.breaker(), moment.now, moment.world.profile().breaker, moment.replica)


def _admits(moment: Moment) -> bool:
    return breaker.admits(moment.world.breaker(), moment.now, moment.world.profile().breaker, moment.replica)


def _history(moment: Moment) -> list[Fact]:
    return _breaker_facts(moment)[-20:]


def _shown(fact: Fact) -> dict[str, Any]:
    return {
        "mechanism": fact.mechanism,
        "from": fact.from_state,
        "to": fact.to_state,
        "at_ms": fact.at,
        "time": fact.at,
        "failure_count": fact.failure_count,
        "status": fact.status,
        "restated_status": fact.restated_status,
        "reason": fact.reason,
        "rule_id": fact.rule_id,
        "retry_hint_source": fact.hint_source,
        "deadline_ms": fact.deadline_at,
        "generation": fact.generation,
        "decision": fact.decision_id,
        "replica": fact.replica,
        "actor": fact.actor,
        "key": fact.key,
    }


def _is_stored(moment: Moment) -> bool:
    """The stored row says what a read shows now."""
    row = moment.world.rows.get((BreakerState.KIND, moment.world.provider, ""))
    return isinstance(row, BreakerState) and row.state is _seen(moment).state


BREAKER: Mapping[str, Callable[[Moment], Any]] = {
    "state": lambda m: str(_seen(m).state),
    "failure_count": lambda m: _seen(m).failure_count,
    "open_cycle_count": lambda m: _seen(m).open_cycle_count,
    "generation": lambda m: _seen(m).generation,
    "half_open_alive": lambda m: _seen(m).half_open_alive,
    "last_failure_kind": lambda m: _seen(m).last_failure_kind,
    "last_failure_at_ms": lambda m: _seen(m).last_failure_at,
    "reopen_at_ms": lambda m: _seen(m).reopen_at,
    "override": lambda m: str(_seen(m).override) or None,
    "retry_after_ms": _retry_after,
    "admits": _admits,
    "stored": _is_stored,
    "effective_degradation_threshold": lambda m: m.world.profile().breaker.degradation_threshold,
    "history_length": lambda m: len(_history(m)),
    "transitions_total": lambda m: len(_breaker_facts(m)),
    "opened_events": lambda m: sum(fact.to_state == State.OPEN for fact in _breaker_facts(m)),
    "half_open_events": lambda m: sum(fact.to_state == State.HALF_OPEN for fact in _breaker_facts(m)),
    "kind_counts": lambda m: {kind: breaker.kind_count(_seen(m), kind) for kind in breaker.KIND_FIELDS},
    "connection_state": lambda m: str(_seen(m, "c1").state),
}


def _value(reader: Callable[[Moment], Any], name: str) -> Callable[[Moment, Any], None]:
    return lambda moment, wanted: _same(name, reader(moment), wanted)


def _breaker(moment: Moment, wanted: Expect) -> None:
    for name, value in wanted.items():
        _same(f"breaker.{name}", BREAKER[name](moment), value)


def _history_newest(moment: Moment, wanted: Expect) -> None:
    shown = _shown(_history(moment)[-1])
    for name, value in wanted.items():
        _same(f"history_newest.{name}", shown[name], value)


# --- the rest -------------------------------------------------------------------------------------------------
def _row(moment: Moment) -> ConnectionState:
    """Row of the connection that the step names, else c1."""
    return moment.world.book().get(ConnectionState, moment.world.provider, moment.connection)


def _connection(moment: Moment, wanted: Expect) -> None:
    for name, value in wanted.items():
        seen = moment.world.writes if name == "writes" else connection_field(_row(moment), name)
        _same(f"connection.{name}", seen, value)


def _model_lock(moment: Moment, wanted: Expect | None) -> None:
    lock = moment.world.lock(moment.model, moment.now, moment.connection)
    if wanted is None:
        assert lock is None, f"model {moment.model!r} is locked until {lock and lock.until}"
        return
    shown: dict[str, Any] = {"locked": lock is not None}
    if lock is not None and lock.until is not None:
        shown |= {"remaining_ms": lock.until - moment.now, "failure_count": lock.failure_count}
        shown |= {"reason": lock.reason, "key": lock.written_as, "hint_source": lock.hint_source or None}
    for name, value in wanted.items():
        assert name in shown, f"model_lock.{name}: unknown, or no lock is in force"
        _same(f"model_lock.{name}", shown[name], value)


def _decision(moment: Moment, wanted: Expect) -> None:
    record = moment.result["record"]
    for name, value in wanted.items():
        _same(f"decision.{name}", getattr(record, name), value)


def _names(fact: Fact) -> tuple[str, ...]:
    """Names under which a transition may be counted."""
    return (fact.to_state, fact.reason, f"{fact.from_state}->{fact.to_state}", f"{fact.mechanism}:{fact.to_state}")


def _facts_count(moment: Moment, wanted: Mapping[str, int]) -> None:
    for name, number in wanted.items():
        facts = moment.world.facts
        seen = len(facts) if name == "any" else sum(name in _names(fact) for fact in facts)
        _same(f"facts_count.{name}", seen, number)


def _facts(moment: Moment, wanted: list[Expect]) -> None:
    """The newest facts of the mechanisms that the expectation names."""
    named = {expected["mechanism"] for expected in wanted if "mechanism" in expected}
    newest = [fact for fact in moment.world.facts if not named or fact.mechanism in named][-len(wanted) :]
    assert len(newest) == len(wanted), f"{len(newest)} facts instead of {len(wanted)}"
    for fact, expected in zip(newest, wanted, strict=True):
        shown = _shown(fact)
        for name, value in expected.items():
            _same(f"facts.{name}", shown[name], value)


def entry(moment: Moment, connection: str) -> ProviderCooldownState:
    """Provider cooldown entry of the provider ("") or of a connection."""
    return moment.world.book().get(ProviderCooldownState, moment.world.provider, connection)


def cooling_ms(moment: Moment, connection: str) -> int:
    """Time for which the entry cools; 0 where it does not, and while the mechanism is off."""
    is_on = moment.world.profile(connection).provider_cooldown.enabled
    return provider_cooldown.remaining_ms(entry(moment, connection), moment.now) if is_on else 0


def _cooling(connection: str) -> Callable[[Moment], bool]:
    return lambda moment: cooling_ms(moment, connection) > 0


def _remaining(connection: str) -> Callable[[Moment], int]:
    return lambda moment: cooling_ms(moment, connection)


COOLDOWN: Mapping[str, Callable[[Moment], Any]] = {
    "provider_cooling": _cooling(""),
    "provider_remaining_ms": _remaining(""),
    "connection_cooling": _cooling("c1"),
    "connection_remaining_ms": _remaining("c1"),
    "provider_failures": lambda m: len(entry(m, "").failures),
    "connection_count": lambda m: entry(m, "c1").count,
}
ACCOUNT: Mapping[str, Callable[[Moment], Any]] = {
    "streak": lambda m: connection_field(_row(m), "streak"),
    "active": lambda m: connection_field(_row(m), "active"),
    "attempts": lambda m: connection_field(_row(m), "attempts"),
    "terminal": lambda m: connection_field(_row(m), "terminal"),
    "test_status": lambda m: connection_field(_row(m), "test_status"),
    "writes": lambda m: m.world.writes,
    "eligible": lambda m: is_eligible(_row(m), m.now),
    "cooling": lambda m: cooldown.is_cooling(_row(m), m.now),
    "health_score": lambda m: cooldown.health_score(_row(m), m.now),
    "error_type": lambda m: m.result["answer"].error_type or None,
    "key": lambda m: m.world.written_key,
    "lock_count": lambda m: sum(row.until is not None for row in m.world.locks()),
}


def _by_model(moment: Moment, name: str, wanted: Mapping[str, Any]) -> None:
    """Expectations of model_lockout.yaml: one value a model."""
    for model, value in wanted.items():
        rows = lockout.lock_rows(moment.world.book(), moment.world.place(model))
        lock = moment.world.lock(model, moment.now)
        shown = {
            "locked": lock is not None,
            "remaining_ms": (lock.until or 0) - moment.now if lock else 0,
            "failure_count": max(row.failure_count for row in rows),
        }
        _same(f"{name}.{model}", shown[name], value)


def _remaining_ms(moment: Moment, wanted: Any) -> None:
    """By model, or of the connection's timer."""
    if isinstance(wanted, Mapping):
        _by_model(moment, "remaining_ms", wanted)
    else:
        _same("remaining_ms", cooldown.remaining_ms(_row(moment), moment.now), wanted)


def _failure_count(moment: Moment, wanted: Any) -> None:
    if isinstance(wanted, Mapping):
        _by_model(moment, "failure_count", wanted)
    else:
        _same("failure_count", _seen(moment).failure_count, wanted)


def _answer(moment: Moment, wanted: Expect) -> None:
    for name, value in wanted.items():
        _same(f"answer.{name}", getattr(moment.result["answer"], name), value)


READERS: Mapping[str, Callable[[Moment, Any], None]] = {
    **{name: _value(reader, name) for name, reader in {**BREAKER, **COOLDOWN, **ACCOUNT}.items()},
    "state_in": lambda m, wanted: _same("state_in", str(_seen(m).state) in wanted, True),
    "breaker": _breaker,
    "connection": _connection,
    "model_lock": _model_lock,
    "decision": _decision,
    "history_newest": _history_newest,
    "facts_count": _facts_count,
    "facts": _facts,
    "failure_count": _failure_count,
    "answer": _answer,
    "locked": lambda m, wanted: _by_model(m, "locked", wanted),
    "remaining_ms": _remaining_ms,
}
