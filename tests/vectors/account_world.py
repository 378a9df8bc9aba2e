"""A small world for the vectors of connections, terminal states, model locks and the egress lock.

One book of rows, one catalogue, no store: outcomes are parsed and folded as the service folds them. Times of vectors
are relative to `base`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from policy_service.application import connection_acts as acts
from policy_service.application.connection_case import Attempt
from policy_service.application.connection_locks import LockWriter, decay_locks
from policy_service.application.events import OutcomeEvent
from policy_service.application.report_plan import FoldResult, fold
from policy_service.domain import breaker, cooldown, guards, lockout, lockout_upkeep
from policy_service.domain.breaker import BreakerState, Override, State
from policy_service.domain.catalogue import Catalogue, Connection, OperatorRule, Provider, ProviderDirectory
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import DecisionRecord
from policy_service.domain.egress import EgressSighting
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.lockout import Decay, LockEvidence, ModelLockState, Place
from policy_service.domain.outcome import CallKind, Origin, Outcome, UsageCounters
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.restatement import restate
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers
from policy_service.storage.codec import row_codec
from tests.vectors.rows import (
    CONNECTION_FLAGS,
    connection_row,
    connection_writes,
    network_error_of,
    profile_numbers,
    stored_settings,
)
from tests.vectors.step_fields import body_text, header_pairs

_LADDER_NAMES = ("base_cooldown_ms", "max_backoff_steps", "honor_upstream_hints")
_FAR_OFF_MS = 10**12


def epoch_ms(value: object) -> int:
    """Instant of an ISO text or date; a plain number is relative and stays."""
    instant = cooldown.read_instant(value)
    assert instant is not None
    return instant


def auth_of(name: str | None) -> AuthClass | None:
    """Auth class by the name vectors use."""
    return None if name is None else AuthClass.NONE if name == "none" else AuthClass(name)


@dataclass(slots=True)
class Answer:
    """What one failure led to, guard or algorithm."""

    fallback: bool
    cooldown_ms: int
    base_cooldown_ms: int = 0
    reason: str = ""
    retry_hint_source: str | None = None
    record: DecisionRecord | None = None
    error_type: str = ""


class AccountWorld:
    """Rows, catalogue and clock of one vector."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.base = epoch_ms(given["now"]) if "now" in given else 0
        self.rows: dict[Key, Row] = {}
        self.facts: list[Fact] = []
        self.writes = 0
        self.events = 0
        self.connections = self._declared()
        self.policy = self._policy(given.get("operator_rules", ()))
        self.last: Answer | None = None
        self.last_connection = "c1"
        self.written_key = ""
        self._seed()

    # -- set-up ------------------------------------------------------------------------------------------
    def _declared(self) -> dict[str, Connection]:
        named = self.given.get("connections")
        if named is None:
            row = self.given.get("connection", {})
            own = {"provider": self.given.get("provider", "acme"), **(row if isinstance(row, dict) else {})}
            others = {lock["connection"] for lock in self.given.get("locks", ()) if "connection" in lock}
            named = {**{name: {"provider": own["provider"]} for name in sorted(others)}, "c1": own}
        return {name: self._connection(name, entry) for name, entry in named.items()}

    def _connection(self, name: str, entry: Mapping[str, Any]) -> Connection:
        clock = self.given.get("node_clock") or {}
        return Connection(
            id=name,
            provider=entry["provider"],
            auth_class=auth_of(self.given.get("auth_class")),
            node_clock_zone=clock.get("zone"),
            node_clock_hour=clock.get("hour"),
            **{flag: entry[flag] for flag in CONNECTION_FLAGS if flag in entry},
        )

    def _policy(self, operator_rules: Any) -> Policy:
        settings = stored_settings(
            {"daily_reset_zone": self.given.get("zone", "UTC"), **self.given.get("settings", {})}
        )
        rules = tuple(OperatorRule(**rule) for rule in operator_rules)
        catalogue = Catalogue(
            providers=self._providers(), connections=self.connections, operator_rules=rules, stored_settings=settings
        )
        return Policy(catalogue, environment=self.given.get("env", {}))

    def _providers(self) -> dict[str, Provider]:
        providers = builtin_providers()
        overrides = self.given.get("profile")
        if overrides:
            entry = ProviderDirectory(providers).get(self.given["provider"])
            named = profile_numbers(overrides, self._profile_name)
            providers = {**providers, entry.id: replace(entry, profile={**entry.profile, **named})}
        return providers

    @staticmethod
    def _profile_name(name: str) -> str:
        if "." in name:
            return name
        return f"connection.{name}" if name in _LADDER_NAMES else f"breaker.{name}"

    def _seed(self) -> None:
        for name, entry in (self._rows_given()).items():
            if isinstance(entry, dict):
                self._seed_connection(name, entry)
        if "breaker_state" in self.given:
            self._seed_breaker(self.given["breaker_state"])
        if "counter" in self.given:
            counter = {"model": self._first_model(), **self.given["counter"]}
            row = self._exact_row(counter["model"])
            failed_at = self.base + counter["last_failure_at_ms"]
            self._store(
                replace(
                    row,
                    failure_count=counter["failure_count"],
                    last_failure_at=failed_at,
                    last_cooldown_ms=counter.get("last_cooldown_ms", 0),
                    reset_after_ms=self.profile().lockout.reset_after_ms,
                )
            )
        for lock in self.given.get("locks", ()):
            self._seed_lock(lock)

    def _seed_breaker(self, state: str) -> None:
        """The provider's breaker; an OPEN one stays so for as long as a vector may last."""
        override = Override.FORCE_OPEN if state == "force_open" else Override.NONE
        reopen_at = self.base + _FAR_OFF_MS if state == "OPEN" else None
        row = BreakerState(self.provider(), state=State("CLOSED" if override else state), override=override)
        self._store(replace(row, last_failure_at=self.base, reopen_at=reopen_at))

    def _first_model(self) -> str:
        return next((step["model"] for step in self.given.get("steps", ()) if "model" in step), "m1")

    def _seed_connection(self, name: str, entry: Mapping[str, Any]) -> None:
        provider = self.policy.canonical(self.connections[name].provider)
        self._store(connection_row(provider, name, entry, self.base))
        for seen in entry.get("egress", ()):
            self._store(EgressSighting(provider, name, seen["ip"], self.base + seen["at_ms"]))

    def _seed_lock(self, lock: Mapping[str, Any]) -> None:
        for n in range(1, lock.get("generated", 1) + 1):
            model = lock["model"].replace("{n}", str(n))
            place = self.place(model, lock.get("connection", "c1"))
            key = lockout.key_of(lock["key"], place.entry, model)
            book = StateBook(self.rows)
            row = lockout.lock_row(book, place, key)
            until = self.base + lock["remaining_ms"]
            self._store(replace(row, model=model, until=until, locked_at=self.base, written_as=lock["key"]))

    def _rows_given(self) -> Mapping[str, Any]:
        named = self.given.get("connections")
        return {"c1": self.given.get("connection", {})} if named is None else named

    def stored(self, value: object) -> int | None:
        """Absolute instant of a relative one, in any stored form; None where it cannot be read."""
        instant = cooldown.read_instant(value)
        return None if instant is None else instant + self.base

    def _exact_row(self, model: str) -> ModelLockState:
        place = self.place(model)
        return lockout.lock_row(StateBook(self.rows), place, lockout.key_of("exact", place.entry, model))

    def _store(self, row: Row) -> None:
        self.rows[row.key] = row

    # -- look-ups ----------------------------------------------------------------------------------------
    def profile(self, connection: str = "c1") -> ConnectionPolicy:
        """What applies to a connection."""
        return self.policy.for_connection(self.provider(connection), connection)

    def provider(self, connection: str = "c1") -> str:
        """Canonical provider of a connection."""
        return self.policy.canonical(self.connections[connection].provider)

    def place(self, model: str, connection: str = "c1") -> Place:
        """Where the locks of a model lie."""
        return Place(self.provider(connection), connection, model, self.profile(connection).provider)

    def row(self, connection: str = "c1") -> ConnectionState:
        """Row of a connection."""
        return StateBook(self.rows).get(ConnectionState, self.provider(connection), connection)

    def locks(self) -> list[ModelLockState]:
        """Every lock row."""
        return [row for row in self.rows.values() if isinstance(row, ModelLockState)]

    def lock(self, model: str, at: int, connection: str = "c1") -> ModelLockState | None:
        """Lock in force that ends last."""
        return lockout.longest_lock(lockout.lock_rows(StateBook(self.rows), self.place(model, connection)), at)

    def count(self, model: str) -> int:
        """Highest failure count over the keys of a model."""
        return max(row.failure_count for row in lockout.lock_rows(StateBook(self.rows), self.place(model)))

    def restart(self) -> None:
        """Every row as a replica finds it again in the store."""
        for key, row in self.rows.items():
            codec = row_codec(type(row))
            self.rows[key] = codec.decode(json.loads(json.dumps(codec.encode(row))))

    # -- events ------------------------------------------------------------------------------------------
    def at(self, step: Mapping[str, Any]) -> int:
        """Instant of a step."""
        return self.base + int(step.get("at_ms", 0))

    def attempt(self, step: Mapping[str, Any]) -> Attempt:
        """Circumstances of a step's outcome."""
        at = self.at(step)
        blocked = breaker.blocks(StateBook(self.rows).get(BreakerState, self.provider(), ""), at)
        return Attempt(at, self._begun(step), permit_id=step.get("permit_id", ""), breaker_blocks=blocked)

    def _begun(self, step: Mapping[str, Any]) -> int:
        started = step.get("started_at_ms")
        return self.at(step) if started is None else self.base + int(started)

    def outcome(self, step: Mapping[str, Any]) -> Outcome:
        """Parsed and restated outcome of a step."""
        outcome = self.reported(step)
        if outcome.is_success or outcome.status is None:
            return outcome
        provider = self.profile(outcome.connection).provider
        return outcome._replace(status=restate(provider, outcome.status, outcome.message, outcome.body, None).status)

    def reported(self, step: Mapping[str, Any]) -> Outcome:
        """Parsed outcome of a step, as the gateway reports it."""
        connection = step.get("connection", "c1")
        connection = connection if isinstance(connection, str) else "c1"
        text = str(step.get("text") or "")
        usage = step.get("usage_counters")
        status = step.get("status", 200)
        raw = RawOutcome(
            status=status if isinstance(status, int) else None,
            network_error=network_error_of(step),
            headers=header_pairs(step),
            body=body_text(step),
            code=step.get("code", ""),
            type=step.get("type", ""),
            name=step.get("name", ""),
            message=text if step.get("body") is not None else "",
            origin=Origin(step.get("origin", "")),
            failure_kind=step.get("failure_kind", ""),
            inner_status=step.get("inner_status"),
            provider=self.provider(connection),
            connection=connection,
            model=step.get("model", ""),
            call_kind=CallKind(step.get("call_kind", "client")),
            pool_attempt=step.get("pool_attempt", False),
            next_target_same_provider=step.get("next_target_same_provider", False),
            persist=step.get("persist", True),
            egress_address=step.get("egress_address", ""),
            usage=UsageCounters(**usage) if usage else None,
            first_output_ms=step.get("first_output_ms"),
        )
        return parse_outcome(raw)

    def event(self, step: Mapping[str, Any]) -> OutcomeEvent:
        """A report without a decision."""
        outcome = self.reported(step)
        self.events += 1
        target = Target(ProviderId(outcome.provider), ConnectionId(outcome.connection), ModelId(outcome.model))
        return OutcomeEvent(
            f"e{self.events}",
            self.at(step),
            target,
            outcome,
            self._begun(step),
            early_probe=step.get("permit_id", ""),
            replica="r1",
        )

    def log(self, step: Mapping[str, Any]) -> FactLog:
        """Fact log of one event."""
        self.events += 1
        return FactLog(Cause(f"e{self.events}", self.at(step), replica="r1", status=step.get("status")))

    def commit(self, book: StateBook, log: FactLog | FoldResult) -> None:
        """Take over what a fold has written."""
        self.writes += connection_writes(self.rows, book.changes.values())
        locks = [row for row in book.changes.values() if isinstance(row, ModelLockState)]
        if locks:
            self.written_key = locks[-1].written_as or locks[-1].key_kind
        self.rows.update(book.changes)
        self.facts.extend(log.facts)

    def failure(self, step: Mapping[str, Any]) -> Answer:
        """One failure through the whole fold."""
        if "operator_rules" in step:
            self.policy = self._policy(step["operator_rules"])
        for _ in range(step.get("concurrent", 1)):
            self.last = _shown(self._fold(step))
        self.last_connection = step.get("connection", "c1") if isinstance(step.get("connection", "c1"), str) else "c1"
        assert self.last is not None
        return self.last

    def _fold(self, step: Mapping[str, Any]) -> FoldResult:
        book = StateBook(self.rows)
        result = fold(book, self.event(step), self.policy)
        self.commit(book, result)
        return result

    def success(self, step: Mapping[str, Any]) -> Decay:
        """One success."""
        answer = self._fold(step).success
        assert answer is not None
        return answer.decay

    def record(self, step: Mapping[str, Any]) -> None:
        """One failure handed to the lock writer."""
        place = self.place(step["model"], step.get("connection", "c1"))
        policy = self.profile(place.connection)
        if self.given.get("max_cooldown") == "none":
            policy = replace(policy, lockout=replace(policy.lockout, max_cooldown_ms=None))
        evidence = LockEvidence(
            step.get("status"),
            step.get("reason", ""),
            step.get("base_ms", 0),
            step.get("exact_ms", 0),
            step.get("exact_source", ""),
            step.get("uncapped", False),
            step.get("scope"),
            local=policy.auth_class is AuthClass.LOCAL,
        )
        log, book = self.log(step), StateBook(self.rows)
        LockWriter(book, place, policy, self.attempt(step), log).write(evidence)
        self.commit(book, log)
        self.rows.update({row.key: row for row in lockout_upkeep.evictions(self.locks(), self.at(step))})

    def decay(self, step: Mapping[str, Any]) -> Decay:
        """A success as far as the counters of a model are concerned."""
        log, book = self.log(step), StateBook(self.rows)
        place = self.place(step["model"])
        result = decay_locks(book, place, self.profile(), self.attempt(step), log)
        self.commit(book, log)
        return result

    def delete(self, step: Mapping[str, Any]) -> None:
        """Manual delete of a model's locks."""
        log, book = self.log(step), StateBook(self.rows)
        acts.delete_lock(book, self.place(step["model"]), log)
        self.commit(book, log)


def _shown(result: FoldResult) -> Answer:
    answer = result.connection
    if answer is None:
        return Answer(guards.guard_allows_fallback(result.guard), 0, record=result.record)
    return Answer(
        answer.fallback,
        answer.cooldown_ms,
        answer.base_cooldown_ms,
        answer.reason,
        answer.retry_hint_source,
        answer.record,
        answer.error_type,
    )


def same(name: str, seen: object, wanted: object) -> None:
    """Raise AssertionError with both values where they differ."""
    assert seen == wanted, f"{name}: {seen!r} instead of {wanted!r}"
