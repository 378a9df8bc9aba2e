"""A small world for the vectors of connections, terminal states, model locks and the egress lock.

One book of rows, one catalogue, no store: outcomes are parsed, restated, guarded, classified and handed to the
failure algorithm as the service does it. Times of vectors are relative to `base`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from policy_service.application import connection_acts as acts
from policy_service.application.connection_case import Attempt
from policy_service.application.connection_locks import LockWriter, decay_locks, lock_for_pool
from policy_service.application.connection_plan import (
    ConnectionAnswer,
    fail_connection,
    rotation_failures,
    succeed_connection,
)
from policy_service.domain import cooldown, error_types, guards, lockout, lockout_upkeep
from policy_service.domain.catalogue import Catalogue, Connection, OperatorRule, Provider, ProviderDirectory
from policy_service.domain.classification import classify, resolve
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.decision_record import DecisionRecord
from policy_service.domain.egress import EgressSighting
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import AuthClass
from policy_service.domain.lockout import Decay, LockEvidence, ModelLockState, Place
from policy_service.domain.outcome import CallKind, Outcome, UsageCounters
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.restatement import restate
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers
from policy_service.storage.codec import row_codec

_FLAGS = ("disable_cooling", "passthrough_models", "spare_keys", "base_url_is_local")
_LADDER_NAMES = ("base_cooldown_ms", "max_backoff_steps", "honor_upstream_hints")
_BREAKING = frozenset({"OPEN", "HALF_OPEN"})


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


_WHEN_HEARD: Mapping[str, Any] = {"failure_heard_at": None, "last_event_at": None}


class AccountWorld:
    """Rows, catalogue and clock of one vector."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.base = epoch_ms(given["now"]) if "now" in given else 0
        self.rows: dict[Key, Row] = {}
        self.facts: list[Fact] = []
        self.writes = 0
        self.events = 0
        self.breaker_blocks = given.get("breaker_state") in _BREAKING
        self.connections = self._declared()
        self.policy = self._policy(given.get("operator_rules", ()))
        self.last: Answer | None = None
        self.written_key = ""
        self._seed()

    # -- set-up ------------------------------------------------------------------------------------------
    def _declared(self) -> dict[str, Connection]:
        named = self.given.get("connections")
        if named is None:
            row = self.given.get("connection", {})
            named = {"c1": {"provider": self.given.get("provider", "acme"), **(row if isinstance(row, dict) else {})}}
        return {name: self._connection(name, entry) for name, entry in named.items()}

    def _connection(self, name: str, entry: Mapping[str, Any]) -> Connection:
        clock = self.given.get("node_clock") or {}
        return Connection(
            id=name,
            provider=entry["provider"],
            auth_class=auth_of(self.given.get("auth_class")),
            node_clock_zone=clock.get("zone"),
            node_clock_hour=clock.get("hour"),
            **{flag: entry[flag] for flag in _FLAGS if flag in entry},
        )

    def _policy(self, operator_rules: Any) -> Policy:
        settings = {"daily_reset_zone": self.given.get("zone", "UTC"), **self.given.get("settings", {})}
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
            named = {self._profile_name(name): value for name, value in overrides.items()}
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
        if "counter" in self.given:
            counter = self.given["counter"]
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

    def _seed_connection(self, name: str, entry: Mapping[str, Any]) -> None:
        provider = self.policy.canonical(self.connections[name].provider)
        until = self.stored(entry.get("rate_limited_until_ms"))
        failed_at = self.stored(entry.get("last_error_at_ms"))
        self._store(
            ConnectionState(
                provider,
                name,
                test_status=entry.get("test_status", "active"),
                generation=entry.get("generation", 1),
                rate_limited_until=until,
                limited_since=failed_at if until is not None else None,
                hint_source=entry.get("hint_source", ""),
                backoff_level=entry.get("backoff_level", 0),
                last_error=entry.get("last_error", ""),
                last_error_at=failed_at,
                token_expires_at=self.stored(entry.get("token_expires_at_ms")),
                quota_reset_at=self.stored(entry.get("quota_reset_at_ms")),
                retry_attempts=entry.get("attempts", 0),
                retry_at=self.stored(entry.get("last_attempt_at_ms")),
            )
        )
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
        started = step.get("started_at_ms")
        begun = at if started is None else self.base + started
        return Attempt(at, begun, permit_id=step.get("permit_id", ""), breaker_blocks=self.breaker_blocks)

    def outcome(self, step: Mapping[str, Any]) -> Outcome:
        """Parsed and restated outcome of a step."""
        connection = step.get("connection", "c1")
        connection = connection if isinstance(connection, str) else "c1"
        body = step.get("body")
        text = str(step.get("text") or "")
        usage = step.get("usage_counters")
        raw = RawOutcome(
            status=step.get("status", 200),
            network_error=step.get("network_error", ""),
            headers=tuple((str(k), str(v)) for k, v in step.get("headers", {}).items()),
            body=json.dumps(body, ensure_ascii=False) if body is not None else text,
            code=step.get("code", ""),
            type=step.get("type", ""),
            message=text if body is not None else "",
            provider=self.provider(connection),
            connection=connection,
            model=step.get("model", ""),
            call_kind=CallKind(step.get("call_kind", "client")),
            pool_attempt=step.get("pool_attempt", False),
            persist=step.get("persist", True),
            usage=UsageCounters(**usage) if usage else None,
            first_output_ms=step.get("first_output_ms"),
        )
        outcome = parse_outcome(raw)
        if outcome.is_success or outcome.status is None:
            return outcome
        restated = restate(self.profile(connection).provider, outcome.status, outcome.message, outcome.body, None)
        return outcome._replace(status=restated.status)

    def log(self, step: Mapping[str, Any]) -> FactLog:
        """Fact log of one event."""
        self.events += 1
        return FactLog(Cause(f"e{self.events}", self.at(step), replica="r1", status=step.get("status")))

    def commit(self, book: StateBook, log: FactLog) -> None:
        """Take over what a fold has written."""
        self.writes += sum(self._is_write(row) for row in book.changes.values())
        locks = [row for row in book.changes.values() if isinstance(row, ModelLockState)]
        if locks:
            self.written_key = locks[-1].written_as or locks[-1].key_kind
        self.rows.update(book.changes)
        self.facts.extend(log.facts)

    def _is_write(self, row: Row) -> bool:
        """A connection row whose status, timer, level or error fields are written (the table of section 4). When a
        failure was last heard of is none of them; README ruling 9 needs it, also of failures that count for nothing."""
        if not isinstance(row, ConnectionState):
            return False
        before = StateBook(self.rows).get(ConnectionState, row.provider, row.connection)
        return replace(row, **_WHEN_HEARD) != replace(before, **_WHEN_HEARD)

    def failure(self, step: Mapping[str, Any]) -> Answer:
        """One failure through guards, classification, failure algorithm and pool lockout."""
        if "operator_rules" in step:
            self.policy = self._policy(step["operator_rules"])
        for _ in range(step.get("concurrent", 1)):
            self.last = self._fail_once(step)
        assert self.last is not None
        return self.last

    def _fail_once(self, step: Mapping[str, Any]) -> Answer:
        outcome, attempt = self.outcome(step), self.attempt(step)
        policy = self.profile(outcome.connection)
        guard = guards.local_guard(outcome, policy)
        log, book = self.log(step), StateBook(self.rows)
        c = classify(outcome, policy, attempt.at, rotation_failures(book, outcome, policy, attempt.at))
        if guard:
            answer = Answer(guards.guard_allows_fallback(guard), 0, record=resolve(c, 0, policy))
            locked: frozenset[Key] = frozenset()
            record = resolve(c, 0, policy)
        else:
            result = fail_connection(book, outcome, c, policy, self.policy, attempt, log)
            answer, locked, record = _shown(result), result.locked, result.record
        lock_for_pool(
            book,
            outcome,
            c.hint,
            record,
            policy,
            attempt,
            log,
            request_scoped=bool(guard),
            about_model=error_types.provider_does_not_serve(outcome),
            already=locked,
        )
        self.commit(book, log)
        return answer

    def success(self, step: Mapping[str, Any]) -> Decay:
        """One success."""
        outcome, log, book = self.outcome(step), self.log(step), StateBook(self.rows)
        answer = succeed_connection(book, outcome, self.profile(outcome.connection), self.attempt(step), log)
        self.commit(book, log)
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


def _shown(result: ConnectionAnswer) -> Answer:
    return Answer(
        result.fallback,
        result.cooldown_ms,
        result.base_cooldown_ms,
        result.reason,
        result.retry_hint_source,
        result.record,
        result.error_type,
    )


def same(name: str, seen: object, wanted: object) -> None:
    """Raise AssertionError with both values where they differ."""
    assert seen == wanted, f"{name}: {seen!r} instead of {wanted!r}"
