"""One limiter, its callers and their upstream calls for the vectors of spec/queue_admission.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from policy_service.domain.gates import GRANT_AT_ONCE, Gate, GateBook, PermitRow, PermitState
from policy_service.domain.ids import AuthClass
from policy_service.domain.line import cancel, release, settle
from policy_service.domain.queue_admission import (
    FLEET_GATE,
    HTTP_STATUS,
    NO_LIMIT,
    Admission,
    QueueCode,
    Submission,
    admit,
    end_code,
    is_paced,
    limiter_gate,
    recover_wedge,
    wedged_since,
)
from tests.vectors.worlds_gates import Fields, LineWorld

_KEY = "p:c1"
_LIMITS = ("concurrent_requests", "requests_per_minute", "min_time_between_requests_ms", "max_queue_depth")
_OTHERS = ("max_wait_ms", "execution_max_wait_ms", "wedge_after_ms", "unbounded_wait")


class _StuckBook(GateBook):
    """A hand-off at fault: it starts nothing, room or not."""

    __slots__ = ()

    def admits(self, key: str, now: int) -> bool:
        return False


class QueueWorld(LineWorld):
    """Limiter `p:c1`; a run ends `runs_ms` after its start."""

    def __init__(self, given: Fields, offer_ms: int = GRANT_AT_ONCE) -> None:
        super().__init__(offer_ms)
        limits = {name: given[name] for name in (*_LIMITS, *_OTHERS) if given.get(name) is not None}
        self.profile = replace(NO_LIMIT, **limits)
        self.is_paced = given.get("enabled", self._declared(given))
        self.gates = {_KEY: limiter_gate(_KEY, self.profile)}
        if given.get("global_concurrent_requests"):
            self.gates[FLEET_GATE] = Gate(FLEET_GATE, given["global_concurrent_requests"], depth=0)
        self.is_stuck = False
        self.outcome: dict[str, str] = {}
        self.called = 0
        self.told: Fields = {}

    def _declared(self, given: Fields) -> bool:
        declared = {name: given.get(name) for name in _LIMITS}
        auth = AuthClass(given.get("auth_class", "api_key"))
        return is_paced(declared, auth, auto_enable=given.get("auto_enable", False))

    def book(self) -> GateBook:
        kind = _StuckBook if self.is_stuck else GateBook
        return kind(self.gates.values(), self.rows.values(), self.offer_ms)

    def run(self, step: Fields) -> Fields:
        """One step; the answer has the field names of the vectors."""
        self.advance(step.get("at_ms", self.now))
        getattr(self, f"on_{step['event']}")(step)
        counts = Counter(self.outcome.values())
        return {
            "outcome": dict(self.outcome),
            "called": self.called,
            "running": counts["RUNNING"],
            "queued": counts["QUEUED"],
            "refused": {code: counts[code] for code in QueueCode if counts[code]},
            **self.told,
        }

    def became(self, row: PermitRow) -> None:
        super().became(row)
        if row.state is PermitState.HELD:
            self.called += 1
            self.outcome[row.request_id] = "RUNNING"
        elif row.state is PermitState.WAITING:
            self.outcome[row.request_id] = "QUEUED"
        elif row.state is PermitState.RELEASED:
            self.outcome[row.request_id] = "DONE"
        elif (code := end_code(row)) is not None:
            self._refused(row.request_id, code)

    def _refused(self, request_id: str, code: QueueCode) -> None:
        self.outcome[request_id] = code
        self.told = {"http_status": HTTP_STATUS[code], "local": True, "code": code}

    # --- events ---

    def on_submit(self, step: Fields) -> None:
        request = step["request"]
        if not self.is_paced:
            self.outcome[request] = "DIRECT"
            self.called += 1
            return
        self.runs_ms[request] = step.get("runs_ms", 0)
        found = self.transact(lambda book: admit(book, _KEY, self.profile, self._submission(step), self.now))
        self._answered(request, found)

    def _answered(self, request: str, found: Admission) -> None:
        if found.code is not None:
            self._refused(request, found.code)

    def _submission(self, step: Fields) -> Submission:
        return Submission(
            request_id=step["request"],
            permit_id=f"ticket-{step['request']}",
            ticket=self.draw(),
            replica=step.get("replica", "r1"),
            remaining_budget_ms=step.get("remaining_budget_ms"),
            start_timeout_ms=step.get("start_timeout_ms"),
            aborted=step.get("aborted", False),
        )

    def on_abort(self, step: Fields) -> None:
        self.transact(lambda book: cancel(book, step["request"], self.now))

    def on_done(self, step: Fields) -> None:
        self.transact(lambda book: release(book, step["request"], self.now))

    def on_tick(self, step: Fields) -> None:
        self.pass_time()

    def on_kill_replica(self, step: Fields) -> None:
        self.dead.add(step["name"])

    def on_stuck(self, step: Fields) -> None:
        self.is_stuck = step["value"]
        self.pass_time()

    def on_storm(self, step: Fields) -> None:
        for n in range(step["requests"]):
            replica = f"r{n % step['replicas'] + 1}"
            self.on_submit({"request": f"s{n:05d}", "replica": replica, "runs_ms": step["runs_ms"]})

    # --- time ---

    def pass_time(self) -> None:
        self.transact(lambda book: settle(book, self.now))
        self.transact(lambda book: recover_wedge(book, _KEY, self.profile, self.now))

    def end_runs(self) -> None:
        for name in [name for name, end in self.run_ends.items() if end <= self.now]:
            self.transact(lambda book, name=name: release(book, name, self.now))  # type: ignore[misc]

    def more_instants(self) -> list[int]:
        since = wedged_since(self.book(), _KEY, self.now)
        return [] if since is None else [since + self.profile.wedge_after_ms]
