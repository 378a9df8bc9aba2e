"""Capped connection, routes and replicas for the vectors of spec/concurrency.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from policy_service.domain.gates import GRANT_AT_ONCE, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.line import Answer, PermitAnswer, PermitRequest, acquire, cancel, release, renew, settle
from policy_service.domain.permits import (
    AtCap,
    OnSaturation,
    PermitCode,
    Refusal,
    at_cap,
    cap_of,
    connection_gate,
    ended_refusal,
    fallback_needs_permit,
    proceeds_without_permit,
    refusal,
    store_unavailable,
    takes_permit,
)
from tests.vectors.worlds_gates import Fields, LineWorld

_GATE = connection_gate("c1")


class PermitWorld(LineWorld):
    """Permits of connection c1. With `offer_ms` a hand-off offers the slot; the replicas that live claim at once."""

    def __init__(self, given: Fields, offer_ms: int = GRANT_AT_ONCE) -> None:
        super().__init__(offer_ms)
        strategy = given.get("strategy", "quota-share")
        self.strategy = "" if strategy == "direct" else strategy
        self.mode = OnSaturation(given.get("on_saturation", "proceed"))
        self.timeout = given.get("queue_timeout_ms", 30_000)
        self.ttl = given.get("permit_ttl_ms", 120_000)
        self.enabled = given.get("enabled", True)
        self.gates = {_GATE: Gate(_GATE, cap_of(given.get("max_concurrent")), given.get("queue_depth", 20))}
        self.is_away = False
        self.overflow = 0
        self.settled: dict[str, str] = {}
        self.told: Fields = {}
        self.granted: list[str] = []
        self.served: set[str] = set()
        self.rejected: Counter[str] = Counter()
        self.permitless: dict[str, int] = {}
        self.peak_dispatched = 0

    def run(self, step: Fields) -> Fields:
        """One step; the answer has the field names of the vectors."""
        self.granted, self.settled, self.told = [], {}, {}
        self.advance(step.get("at_ms", self.now))
        answer: Fields = getattr(self, f"on_{step['event']}")(step)
        return {**self._state(), **self.told, **answer}

    def _state(self) -> Fields:
        return {
            "granted": self.granted,
            "held": len(self.states(PermitState.HELD)),
            "waiting": len(self.states(PermitState.WAITING)),
            "overflow": self.overflow,
            "max_held": self.peak_held,
            "outcome": self.settled,
            "served_with_permit": len(self.served),
            "rejected": dict(self.rejected),
            "max_dispatched": self.peak_dispatched,
        }

    def became(self, row: PermitRow) -> None:
        super().became(row)
        if row.state is PermitState.HELD:
            self.granted.append(row.request_id)
            self.served.add(row.request_id)
            self._count_dispatched()
        told = ended_refusal(row.state, self.book(), row.gate, self.now)
        if told is not None and told.code is PermitCode.TIMEOUT:
            answer = self._refused(told, row.request_id)
            self.settled[row.request_id] = answer.get("code") or answer["result"]
            self.told = {name: answer[name] for name in ("http_status", "reason", "retry_after_s") if name in answer}

    def _count_dispatched(self) -> None:
        held = len(self.states(PermitState.HELD))
        self.peak_dispatched = max(self.peak_dispatched, held + len(self.permitless))

    # --- events ---

    def on_acquire(self, step: Fields) -> Fields:
        if not takes_permit(self.strategy, self.gates[_GATE].limit, self.enabled):
            return {"result": "NO_GATE"}
        if self.is_away:
            return {**self._refused(store_unavailable(), step["request"]), "degraded": True}
        excludes = at_cap(self.strategy) is AtCap.EXCLUDE
        found, told = self._acquire(step["request"], step.get("replica", "r1"), 0 if excludes else self.timeout)
        if excludes and told is not None:
            return {"result": "EXCLUDED", "mechanism": "concurrency", "reason": "concurrency_cap"}
        if told is not None:
            return self._refused(told, step["request"])
        return _shown(found)

    def _acquire(self, request_id: str, replica: str, timeout_ms: int) -> tuple[PermitAnswer, Refusal | None]:
        request = PermitRequest(
            request_id=request_id,
            permit_id=f"permit-{request_id}",
            gates=(_GATE,),
            ticket=self.draw(),
            ttl_ms=self.ttl,
            timeout_ms=timeout_ms,
            replica=replica,
        )

        def run(book: GateBook) -> tuple[PermitAnswer, Refusal | None]:
            found = acquire(book, request, self.now)
            return found, refusal(found, book, self.now)

        return self.transact(run)

    def _refused(self, told: Refusal, request_id: str) -> Fields:
        if proceeds_without_permit(self.strategy, self.mode, told.code):
            self._dispatch_without_permit(request_id)
            return {"result": "PROCEED", "permit": "none"}
        self.rejected[told.code] += 1
        return {
            "result": told.code,
            "code": told.code,
            "http_status": told.http_status,
            "reason": told.reason,
            "retry_after_s": told.retry_after_s,
        }

    def _dispatch_without_permit(self, request_id: str) -> None:
        self.overflow += 1
        if request_id in self.runs_ms:
            self.permitless[request_id] = self.now + self.runs_ms[request_id]
        self._count_dispatched()

    def on_release(self, step: Fields) -> Fields:
        return self._over(step, release)

    def on_complete(self, step: Fields) -> Fields:
        return self._over(step, release)

    def on_cancel(self, step: Fields) -> Fields:
        return self._over(step, cancel)

    def _over(self, step: Fields, operation: Callable[[GateBook, str, int], PermitAnswer]) -> Fields:
        return _shown(self.transact(lambda book: operation(book, step["request"], self.now)))

    def on_renew(self, step: Fields) -> Fields:
        def run(book: GateBook) -> tuple[PermitAnswer, Refusal | None]:
            found = renew(book, step["request"], self.now)
            return found, refusal(found, book, self.now)

        found, told = self.transact(run)
        return _shown(found) if told is None else {"code": told.code, "http_status": told.http_status}

    def on_tick(self, step: Fields) -> Fields:
        self.pass_time()
        return {}

    def on_kill_replica(self, step: Fields) -> Fields:
        self.dead.add(step["name"])
        return {}

    def on_set_cap(self, step: Fields) -> Fields:
        self.gates[_GATE] = replace(self.gates[_GATE], limit=cap_of(step["value"]))
        self.transact(lambda book: settle(book, self.now))
        return {}

    def on_store_away(self, step: Fields) -> Fields:
        self.is_away = True
        return {}

    def on_fallback_dispatch(self, step: Fields) -> Fields:
        if not fallback_needs_permit(self.mode):
            if not self.transact(lambda book: book.admits(_GATE, self.now)):
                self._dispatch_without_permit(step["request"])
            return {"result": "DISPATCH", "permit": "none"}
        found, told = self._acquire(step["request"], step.get("replica", "r1"), 0)
        if told is not None:
            return {"result": "EXCLUDED", "mechanism": "concurrency", "reason": "concurrency_cap"}
        return {"result": "DISPATCH", "permit": found.row.permit_id if found.row else None}

    def on_stampede(self, step: Fields) -> Fields:
        names = [f"s{n:05d}" for n in range(step["requests"])]
        self.runs_ms |= {name: int(step["hold_ms"]) for name in names}
        for n, name in enumerate(names):
            self.on_acquire({"request": name, "replica": f"r{n % step['replicas'] + 1}"})
        return {}

    def end_runs(self) -> None:
        for name in [name for name, end in self.run_ends.items() if end <= self.now]:
            self.transact(lambda book, name=name: release(book, name, self.now))  # type: ignore[misc]
        self.permitless = {name: end for name, end in self.permitless.items() if end > self.now}

    def more_instants(self) -> list[int]:
        return list(self.permitless.values())


def _shown(found: PermitAnswer) -> Fields:
    answer: Fields = {"result": found.answer}
    if found.row is not None and found.answer in (Answer.HELD, Answer.RENEWED):
        answer |= {"expires_at_ms": found.row.expires_at, "permit": found.row.permit_id}
    return answer
