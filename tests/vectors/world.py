"""A small world for the vectors that drive the whole fold: one book of rows, one policy, several replicas.

Selections acquire and outcomes fold through the same pure functions as the service; there is no store and no clock.
`restart` sends every row through the codec of the stores, as a replica that reads them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from policy_service.application import admin_plan
from policy_service.application.admission_plan import Admission, acquire_early, acquire_probe
from policy_service.application.breaker_plan import give_back
from policy_service.application.connection_acts import recover_connection
from policy_service.application.events import OutcomeEvent
from policy_service.application.report_plan import FoldResult, fold
from policy_service.domain import lockout, setting_specs
from policy_service.domain.breaker import KIND_FIELDS, BreakerState, Override, ProbePermit, State
from policy_service.domain.breaker_controls import load_row, read_state
from policy_service.domain.breaker_probe import ProbeRequest, Verdict
from policy_service.domain.catalogue import Catalogue, Connection, OperatorRule
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.cooldown import RecoveryView
from policy_service.domain.facts import Cause, Fact, FactLog
from policy_service.domain.ids import AuthClass, ConnectionId, Generations, Instant, ModelId, ProviderId, Target
from policy_service.domain.lockout import ModelLockState, Place
from policy_service.domain.outcome import CallKind, Origin, Outcome, UsageCounters
from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.profiles import KindThreshold
from policy_service.domain.settings import REGISTRY
from policy_service.domain.state import Key, Row, StateBook
from policy_service.settings.provider_data import builtin_providers
from tests.vectors.rows import (
    CONNECTION_FLAGS,
    connection_row,
    connection_writes,
    network_error_of,
    row_from,
    stored_settings,
)
from tests.vectors.step_fields import body_text, header_pairs

Given = Mapping[str, Any]
assert setting_specs.CLASSES


class VectorPolicy(Policy):
    """A policy whose breakers also have the kind thresholds of a vector, which no setting supplies."""

    kind_thresholds: Mapping[str, KindThreshold] = {}

    def for_connection(
        self, provider: str, connection: str = "", auth_class: AuthClass | None = None
    ) -> ConnectionPolicy:
        found = super().for_connection(provider, connection, auth_class)
        return replace(found, breaker=replace(found.breaker, kind_thresholds=self.kind_thresholds))


@dataclass(frozen=True, slots=True)
class Decision:
    """What a selection handed out."""

    id: str
    target: Target
    started_at: Instant
    replica: str
    generations: Generations
    admission: Admission
    early_probe: str = ""


class World:
    """Rows, policy, decisions and facts of one vector."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.config: dict[str, Any] = dict(given.get("config", {}))
        self.settings: dict[str, Any] = dict(given.get("settings", {}))
        if "enabled" in given:
            self.settings["provider_cooldown.enabled"] = given["enabled"]
        self.operator_rules: list[Given] = list(given.get("operator_rules", ()))
        self.policy = self._policy()
        self.provider = self.policy.canonical(given.get("provider", "acme"))
        self.rows: dict[Key, Row] = {}
        self.facts: list[Fact] = []
        self.decisions: dict[str, Decision] = {}
        self.answers: dict[str, FoldResult] = {}
        self.draws: list[float] = list(given.get("random", ()))
        self.replicas: list[str] = list(given.get("replicas", ["r1"]))
        self.writes = 0
        self.written_key = ""
        self._number = 0
        self._seed()

    # -- set-up ------------------------------------------------------------------------------------------
    @property
    def auth_class(self) -> AuthClass | None:
        """Class stated with each call; a provider of the catalogue has its own."""
        name = self.given.get("auth_class")
        if name is None:
            return None if self.given.get("provider") else AuthClass.API_KEY
        return AuthClass.NONE if name == "none" else AuthClass(name)

    def _policy(self) -> VectorPolicy:
        config = {name: value for name, value in self.config.items() if name != "kind_thresholds"}
        stored = stored_settings({self._setting_name(name): value for name, value in config.items()} | self.settings)
        providers = builtin_providers()
        names = [f"c{n}" for n in range(1, int(self.given.get("provider_connections", 0)) + 1)]
        flags = self._flags()
        connections = {name: self._declared(name, {}) for name in names} | (
            {"c1": self._declared("c1", flags)} if flags else {}
        )
        rules = tuple(OperatorRule(**rule) for rule in self.operator_rules)
        catalogue = Catalogue(
            providers=providers, connections=connections, operator_rules=rules, stored_settings=stored
        )
        policy = VectorPolicy(catalogue, environment=self.given.get("env", {}))
        policy.kind_thresholds = {
            kind: KindThreshold(**rule) for kind, rule in self.config.get("kind_thresholds", {}).items()
        }
        return policy

    def _flags(self) -> Mapping[str, Any]:
        """Traits of c1 that are declared and not stored."""
        traits = self.given.get("connection")
        own = traits if isinstance(traits, dict) else {}
        return {flag: own[flag] for flag in CONNECTION_FLAGS if flag in own}

    def _declared(self, name: str, flags: Mapping[str, Any]) -> Connection:
        return Connection(id=name, provider=self.given.get("provider", "acme"), auth_class=self.auth_class, **flags)

    def _setting_name(self, name: str) -> str:
        by_class = f"breaker.{self._class_name()}.{name}"
        return by_class if by_class in REGISTRY else f"breaker.{name}"

    def _class_name(self) -> str:
        if self.auth_class is not None:
            return str(self.auth_class)
        entry = Policy(Catalogue(providers=builtin_providers())).for_connection(self.given["provider"])
        return str(entry.auth_class)

    def _seed(self) -> None:
        state = {**self.given.get("state", {}), **self.given.get("stored_row", {})}
        if state:
            self._seed_breaker(state)
        if isinstance(self.given.get("connection"), dict):
            row = connection_row(self.provider, "c1", self.given["connection"])
            self.rows[row.key] = row
        for lock in self.given.get("locks", ()):
            self._seed_lock(lock)
        if "counter" in self.given:
            self._seed_counter(self.given["counter"])

    def _seed_breaker(self, state: Given) -> None:
        kinds = {KIND_FIELDS[kind]: count for kind, count in (state.get("kind_counts") or {}).items()}
        plain = {name: value for name, value in state.items() if name not in ("kind_counts", "permits")}
        typed = {"state": read_state(state.get("state", "")), "override": Override(state.get("override") or "")}
        row = row_from(BreakerState(self.provider), {**plain, **typed, **kinds})
        permits = tuple(self._permit(n, given, row.generation) for n, given in enumerate(state.get("permits", ())))
        self.rows[row.key] = replace(row, half_open_round=row.generation, permits=permits)

    def _permit(self, number: int, given: Given, generation: int) -> ProbePermit:
        permit: ProbePermit = row_from(ProbePermit(f"stored-{number}", generation, generation, "r1", "", 0, 0), given)
        return permit

    def _seed_lock(self, lock: Given) -> None:
        for n in range(1, int(lock.get("generated", 1)) + 1):
            self._seed_one_lock({**lock, "model": lock["model"].replace("{n}", str(n))})

    def _seed_one_lock(self, lock: Given) -> None:
        place = self.place(lock["model"], lock.get("connection", "c1"))
        row = lockout.lock_row(self.book(), place, lockout.key_of(lock["key"], place.entry, lock["model"]))
        since, source = lock.get("locked_at_ms", 0), lock.get("hint_source", "")
        until = lock.get("until_ms", lock.get("remaining_ms"))
        count = lock.get("failure_count", 1)
        locked = replace(row, model=lock["model"], until=until, locked_at=since, hint_source=source)
        self.rows[row.key] = replace(locked, written_as=lock["key"], failure_count=count, last_failure_at=since)

    def _seed_counter(self, counter: Given) -> None:
        place = self.place(counter.get("model", "m1"))
        row = lockout.lock_row(self.book(), place, lockout.key_of("exact", place.entry, place.model))
        names = ("failure_count", "last_failure_at_ms", "last_cooldown_ms")
        seeded = row_from(row, {name: counter[name] for name in names if name in counter})
        self.rows[row.key] = replace(seeded, reset_after_ms=self.profile("c1").lockout.reset_after_ms)

    # -- look-ups ----------------------------------------------------------------------------------------
    def profile(self, connection: str = "") -> ConnectionPolicy:
        """What applies to a connection of the vector's provider."""
        return self.policy.for_connection(self.provider, connection, self.auth_class)

    def book(self) -> StateBook:
        """A book over the rows."""
        return StateBook(self.rows)

    def breaker(self, connection: str = "") -> BreakerState:
        """Row of the provider's breaker, or of a connection's own."""
        row = self.book().get(BreakerState, self.provider, connection)
        return load_row(row, self.profile(connection).breaker)

    def target(self, connection: str = "", model: str = "") -> Target:
        """A target of the vector's provider."""
        return Target(ProviderId(self.provider), ConnectionId(connection), ModelId(model))

    def place(self, model: str, connection: str = "c1") -> Place:
        """Where the locks of a model lie."""
        return Place(self.provider, connection, model, self.profile(connection).provider)

    def lock(self, model: str, now: Instant, connection: str = "c1") -> ModelLockState | None:
        """Lock in force that ends last."""
        return lockout.longest_lock(lockout.lock_rows(self.book(), self.place(model, connection)), now)

    def locks(self) -> list[ModelLockState]:
        """Every row of a model lock."""
        return [row for row in self.rows.values() if isinstance(row, ModelLockState)]

    # -- selections --------------------------------------------------------------------------------------
    def admit(self, step: Given, name: str, now: Instant, replica: str = "") -> Admission:
        """One selection of the target that the step names."""
        replica = replica or step.get("replica", "r1")
        target = self.target(step.get("connection", ""), step.get("model", ""))
        facts = self.log(now, name, replica)
        book = self.book()
        generations = self._generations(target)
        request = ProbeRequest(f"permit-{name}-{self._number}", replica, name)
        admission = acquire_probe(book, target, now, self.profile(target.connection), request, facts)
        self.commit(book, facts)
        if admission.granted:
            self.decisions[name] = Decision(name, target, now, replica, generations, admission)
        return admission

    def early_probe(self, step: Given, name: str, now: Instant) -> bool:
        """One selection that may only test a long block."""
        connection, model = step.get("connection", "c1"), step.get("model", "")
        target, book = self.target(connection, model), self.book()
        permit = acquire_early(book, target, now, self.profile(connection), f"early-{name}")
        self.commit(book, self.log(now, name, step.get("replica", "r1")))
        if permit is not None:
            generations = self._generations(target)
            replica = step.get("replica", "r1")
            self.decisions[name] = Decision(name, target, now, replica, generations, Admission(True), permit.id)
        return permit is not None

    def deny(self, name: str) -> None:
        """A later gate refused: every permit of the decision goes back."""
        book = self.book()
        for ref in self.decisions[name].admission.probes:
            assert give_back(book, ref)
        self.rows.update(book.changes)

    def _generations(self, target: Target) -> Generations:
        book = self.book()
        connection = book.get(ConnectionState, target.provider, target.connection).generation
        lock = lockout.generation_of(book, self.place(target.model, target.connection)) if target.model else 1
        return Generations(book.get(BreakerState, target.provider, "").generation, connection, lock)

    # -- outcomes ----------------------------------------------------------------------------------------
    def report(self, step: Given, now: Instant, decision: str = "", connection: str = "") -> FoldResult:
        """Fold one reported outcome; a report that was folded before changes nothing."""
        event = self.event(step, now, decision, connection)
        if event.event_id in self.answers:
            return FoldResult(causes=("duplicate",))
        book = self.book()
        result = fold(book, event, self.policy, self._next_draw(), now=now, replicas=len(self.replicas))
        if any(fact.to_state == State.OPEN for fact in result.facts):
            self.draws = self.draws[1:]
        self.commit(book, result)
        self.answers[event.event_id] = result
        return result

    def _next_draw(self) -> float:
        """The next value of the random source, which only a trip takes."""
        return self.draws[0] if self.draws else 0.0

    def event(self, step: Given, now: Instant, decision: str = "", connection: str = "") -> OutcomeEvent:
        """The event of a step; a step may repeat the report of an `event_id`."""
        self._number += 1
        held = self.decisions.get(decision)
        own = step.get("connection", connection)
        target = self.target(own, step.get("model", ""))
        if held is not None:
            target = self.target(step.get("connection", held.target.connection), step.get("model", held.target.model))
        return OutcomeEvent(
            event_id=f"{held.id}/0" if held else step.get("event_id", f"report/{self._number}"),
            at=now,
            target=target,
            outcome=self.outcome(step, target),
            started_at=held.started_at if held else int(step.get("started_at_ms", now)),
            first_byte_at=step.get("first_byte_at_ms"),
            generations=held.generations if held else None,
            probes=held.admission.probes if held else (),
            early_probe=held.early_probe if held else "",
            replica=step.get("replica", held.replica if held else "r1"),
            decision_id=held.id if held else "",
        )

    def outcome(self, step: Given, target: Target) -> Outcome:
        """Parsed outcome of a step; a status that is no number cannot be read."""
        status = step.get("status")
        text = str(step.get("text") or "")
        raw = RawOutcome(
            status=status if isinstance(status, int) else None,
            network_error=network_error_of(step),
            headers=header_pairs(step),
            body=body_text(step),
            code=step.get("code", ""),
            type=step.get("type", ""),
            name=step.get("name", ""),
            message=text if step.get("body") is not None else "",
            provider=target.provider,
            connection=target.connection,
            model=target.model,
            auth_class=self.auth_class,
            origin=Origin(step.get("origin", "")),
            failure_kind=step.get("failure_kind", ""),
            call_kind=CallKind(step.get("call_kind", "client")),
            inner_status=step.get("inner_status"),
            pool_attempt=step.get("pool_attempt", False),
            next_target_same_provider=step.get("next_target_same_provider", False),
            persist=step.get("persist", True),
            egress_address=step.get("egress_address", ""),
            circuit_open_answer=step.get("circuit_open_answer", False),
            own_queue_timeout=step.get("own_queue_timeout", False),
            own_timeout=step.get("own_timeout", False),
            first_output_ms=step.get("first_output_ms"),
            token_expires_at=step.get("token_expires_at_ms"),
            usage=UsageCounters(**step["usage_counters"]) if "usage_counters" in step else None,
        )
        return parse_outcome(raw)

    # -- acts --------------------------------------------------------------------------------------------
    def control(self, name: str, now: Instant, replica: str = "r1") -> None:
        """A manual control of the provider's breaker."""
        book, facts = self.book(), self.log(now, name, replica)
        admin_plan.control_breaker(book, name, self.provider, "", now, facts)
        self.commit(book, facts)

    def delete_lock(self, model: str, now: Instant) -> None:
        """Manual delete of a model's locks on c1."""
        book, facts = self.book(), self.log(now, "delete", "r1")
        admin_plan.clear_model_lock(book, self.provider, "c1", model, self.policy, facts)
        self.commit(book, facts)

    def recover(self, step: Given, now: Instant) -> bool:
        """A recovery job that saw the connection as the step says."""
        wanted = step["expected"]
        seen = RecoveryView(
            wanted.get("test_status", "active"), wanted.get("last_error_at_ms"), wanted.get("rate_limited_until_ms")
        )
        book, facts = self.book(), self.log(now, "recover", "r1")
        applied = recover_connection(book, self.provider, step.get("connection", "c1"), seen, now, facts)
        self.commit(book, facts)
        return applied

    def change_credential(self, connection: str, now: Instant) -> None:
        """A new credential of a connection."""
        book, facts = self.book(), self.log(now, "credential", "r1")
        admin_plan.change_credential(book, self.provider, connection, now, facts)
        self.commit(book, facts)

    def configure(self, config: Given, settings: Given) -> None:
        """A change of settings at run time."""
        self.config.update(config)
        self.settings.update(settings)
        self.policy = self._policy()

    def set_rules(self, rules: list[Given]) -> None:
        """The operator's rules from now on."""
        self.operator_rules = list(rules)
        self.policy = self._policy()

    def restart(self) -> None:
        """A replica with an empty memory: everything it knows it reads from the database."""
        from policy_service.storage.rows import decode_row, encode_row

        stored = [(row.KIND, json.loads(json.dumps(encode_row(row)))) for row in self.rows.values()]
        read = (decode_row(kind, columns) for kind, columns in stored)
        self.rows = {row.key: row for row in read if row is not None}

    def log(self, now: Instant, name: str, replica: str) -> FactLog:
        """Facts of one act."""
        self._number += 1
        return FactLog(Cause(f"act-{self._number}", now, replica=replica, decision_id=name, actor="operator"))

    def commit(self, book: StateBook, facts: FactLog | FoldResult) -> None:
        """Take over what a fold wrote."""
        self.writes += connection_writes(self.rows, book.changes.values())
        locks = [row for row in book.changes.values() if isinstance(row, ModelLockState)]
        self.written_key = (locks[-1].written_as or locks[-1].key_kind) if locks else self.written_key
        self.rows.update(book.changes)
        self.facts.extend(facts.facts)


def verdict_text(result: FoldResult) -> str | None:
    """Verdict of a probe by its name."""
    return None if result.verdict is None else str(Verdict(result.verdict))
