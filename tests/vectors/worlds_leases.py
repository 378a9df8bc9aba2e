"""A small world of keys, connections and lease rows for the vectors of spec/leases.md. No time but the steps'."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from policy_service.domain import lease, lease_selection
from policy_service.domain.catalogue import Caller
from policy_service.domain.lease import EndReason, LeaseCall, LeaseResult, LeaseRow, LeaseRules, LeaseState, LeaseStep
from policy_service.domain.lease_context import (
    AdmittedCall,
    LeaseAction,
    LeaseCode,
    LeaseRefusal,
    LifecycleRequest,
    Refused,
    admit,
    is_managed,
    owner_hash,
    read_context,
    standing_refusal,
)
from policy_service.domain.lease_selection import (
    Blocked,
    Candidate,
    ClaimVerdict,
    LeasePlan,
    ManagedRequest,
    PlanKind,
    after_claim,
    check_dispatch,
    claim,
    fence_first,
    hide_managed,
    judge_report,
    managed_connections,
)

Fields = dict[str, Any]
_MANAGED: Fields = {"scopes": ["lease:exclusive"], "allowed_connections": ["c1", "c2", "c3"], "enabled": True}
_KEYS: list[Fields] = [
    {"id": "k1", **_MANAGED},
    {"id": "k2", **_MANAGED},
    {"id": "u1", "scopes": [], "allowed_connections": [], "enabled": True},
    {"id": "k-empty", "scopes": ["lease:exclusive"], "allowed_connections": [], "enabled": True},
]
_CONNECTIONS: list[Fields] = [{"id": f"c{n}", "provider": "p", "state": "eligible"} for n in (1, 2, 3)]
_BLOCKED = {
    "eligible": Blocked.NO,
    "cooling": Blocked.COOLING,
    "model_locked": Blocked.MODEL_LOCKED,
    "terminal": Blocked.TERMINAL,
    "quota": Blocked.QUOTA,
}
_FAILED = LeaseRefusal(LeaseCode.SERVICE_UNAVAILABLE)


def token_of(owner: str) -> str:
    """`A` stands for the token made of 43 times `A`; longer names are padded."""
    return f"vlo_{owner * 43}" if len(owner) == 1 else f"vlo_{owner:_<43}"


def _caller(fields: Fields) -> Caller:
    return Caller(
        id=fields["id"],
        key_sha256="",
        enabled=fields.get("enabled", True),
        scopes=frozenset(fields.get("scopes", ())),
        allowed_connections=tuple(fields.get("allowed_connections", ())),
    )


class LeaseWorld:
    """Rows, keys and connections; one method per event."""

    def __init__(self, given: Fields) -> None:
        self.now = 0
        self.rows: list[LeaseRow] = []
        self.keys = {key["id"]: _caller(key) for key in given.get("keys", _KEYS)}
        self.connections = {each["id"]: dict(each) for each in given.get("connections", _CONNECTIONS)}
        self.models = set(given.get("models", ("m", "m1", "m2")))
        self.delay = given.get("lock_delay_ms", 0)
        self.pin = given.get("pin")
        self.listed_at: dict[str, int] = {}
        self.is_away = False
        self.peaks = Counter[str]()

    def run(self, step: Fields) -> Fields:
        """One step; the answer has the field names of the vectors."""
        self.now = step.get("at_ms", self.now)
        answer: Fields = getattr(self, f"on_{step['event']}")(step)
        return {**answer, "state": self.state(answer.get("_rows", ()))}

    # --- store operations ---

    def on_acquire(self, step: Fields) -> Fields:
        return self._stored(lease.acquire(self.rows, self._call(step), self._rules(step["connection"]), self.now))

    def on_transition(self, step: Fields) -> Fields:
        return self._stored(lease.transition(self.rows, self._call(step), self._rules(step["connection"]), self.now))

    def on_renew(self, step: Fields) -> Fields:
        return self._stored(lease.renew(self.rows, self._call(step), self.now))

    def on_release(self, step: Fields) -> Fields:
        return self._stored(lease.release(self.rows, self._call(step), self.now))

    def on_invalidate(self, step: Fields) -> Fields:
        return self._stored(lease.invalidate(self.rows, self._call(step), self.now))

    def on_get(self, step: Fields) -> Fields:
        found = lease.get(self.rows, self._call(step), self.now)
        shown = {"connection_id_present": False, "lifecycle_state": found.lease.state if found.lease else None}
        return {**self._stored(found), **shown}

    def on_fence(self, step: Fields) -> Fields:
        return {"result": lease.fence(self.rows, self._call(step), self.now)}

    def on_expire(self, step: Fields) -> Fields:
        lapsed = lease.expire(self.rows, self.now)
        self._apply(lapsed)
        return {"expired": len(lapsed)}

    # --- public calls ---

    def on_acquire_call(self, step: Fields) -> Fields:
        body = {"action": "acquire", "model": step.get("model", "m")}
        if step.get("ttl_ms") is not None:
            body["ttlMs"] = step["ttl_ms"]
        return self.http({"key": step["key"], "owner": token_of(step["owner"]), "body": body})

    def http(self, given: Fields) -> Fields:
        """One call of the public lifecycle."""
        key = given.get("key")
        request = LifecycleRequest(
            has_api_key=key is not None,
            caller=self.keys.get(key) if key is not None else None,
            body=given["body"],
            owner=given.get("owner"),
            content_type=given.get("content_type", "application/json"),
        )
        admitted = admit(request)
        if not isinstance(admitted, AdmittedCall):
            return _refused(admitted)
        if self.is_away:
            return _refused(_FAILED)
        return self._lifecycle(admitted)

    def _lifecycle(self, admitted: AdmittedCall) -> Fields:
        action, asked = admitted.call.action, admitted.call
        if action is LeaseAction.ACQUIRE:
            return self._acquire_public(admitted)
        call = LeaseCall(
            admitted.owner_hash, admitted.caller.id, asked.generation, ttl_ms=asked.ttl_ms, reason=asked.reason
        )
        operation = {LeaseAction.RENEW: lease.renew, LeaseAction.RELEASE: lease.release, LeaseAction.STATUS: lease.get}
        step = operation[action](self.rows, call, self.now)
        if step.result is LeaseResult.STALE:
            return _refused(LeaseRefusal(LeaseCode.FENCE_STALE))
        return {**self._stored(step), "http_status": 200}

    def _acquire_public(self, admitted: AdmittedCall) -> Fields:
        if admitted.call.model not in self.models:
            return _refused(LeaseRefusal(LeaseCode.MODEL_INVALID))
        own = lease.active_of_owner(self.rows, admitted.owner_hash, self.now)
        if own is not None and own.api_key_id != admitted.caller.id:
            return _refused(LeaseRefusal(LeaseCode.FENCE_STALE))
        request = ManagedRequest(frozenset(admitted.caller.allowed_connections), own, is_acquire=True)
        plan = self._plan(request)
        call = LeaseCall(admitted.owner_hash, admitted.caller.id, ttl_ms=admitted.call.ttl_ms)
        step = self._take(plan, request, call)
        if step is None or plan.code is not None:
            return self._dead_end(plan, request)
        return {**self._stored(step), "http_status": 200}

    def on_select(self, step: Fields) -> Fields:
        caller = self.keys[step["key"]]
        if not is_managed(caller):
            return self._select_unmanaged(caller, step)
        if self.is_away:
            return _refused(_FAILED)
        named = step.get("lease") or {}
        owner = token_of(named["owner"]) if "owner" in named else None
        generation = str(named["generation"]) if "generation" in named else None
        context = read_context(owner, generation)
        if isinstance(context, LeaseRefusal):
            return _refused(context)
        forced = step.get("force_connection") or ""
        own = fence_first(self.rows, context, caller.id, forced, self.now)
        if isinstance(own, LeaseRefusal):
            return _refused(own)
        return self._select_managed(ManagedRequest(frozenset(caller.allowed_connections), own, forced=forced))

    def _select_managed(self, request: ManagedRequest) -> Fields:
        assert request.own is not None
        plan = self._plan(request)
        step = self._take(plan, request, LeaseCall(request.own.owner_hash, request.own.api_key_id))
        if step is None:
            return self._dead_end(plan, request)
        found = self._stored(step)
        verdict = {"verdict": "Dispatch", "connection": step.lease.connection_id if step.lease else None}
        return {**found, **verdict, "lease": step.result, "exclusions": _exclusions(plan)}

    def _select_unmanaged(self, caller: Caller, step: Fields) -> Fields:
        if step.get("lease"):
            refused = standing_refusal(caller)
            assert refused is not None
            return _refused(refused)
        hidden = hide_managed(self.connections, managed_connections(self.keys.values()))
        names = {each.connection for each in hidden}
        left = [each for each in self._pool() if each.connection not in names and not each.blocked]
        plan = LeasePlan(PlanKind.CHOOSE, exclusions=hidden)
        answer: Fields = {"exclusions": _exclusions(plan), "degraded": self.is_away, "capacity_state": False}
        return answer | ({"verdict": "Dispatch", "connection": left[0].connection} if left else {"verdict": "Reject"})

    def on_check_fence(self, step: Fields) -> Fields:
        named = step["lease"]
        call = LeaseCall(
            owner_hash(token_of(named["owner"])),
            step["key"],
            named["generation"],
            connection_id=step["connection"] or "",
        )
        refused = check_dispatch(self.rows, call, self.now)
        local = {"cools": False, "counts_for_breaker": False, "fallback": False}
        return {"http_status": 200, "grpc": "OK", "result": "VALID"} if refused is None else _refused(refused) | local

    def on_report(self, step: Fields) -> Fields:
        named = step["lease"]
        call = LeaseCall(
            owner_hash(token_of(named["owner"])), step["key"], named["generation"], connection_id=step["connection"]
        )
        verdict = lease.fence(self.rows, call, self.now)
        answer: Fields = {"lease": judge_report(verdict), "connection_failure_recorded": step["status"] >= 400}
        refused = check_dispatch(self.rows, call, self.now)
        if refused is not None:
            return answer | {"code": refused.code}
        if step.get("end_lease"):
            ended = lease.release(self.rows, replace(call, reason=EndReason(step["end_lease"])), self.now)
            self._apply(ended.writes)
        return answer

    # --- several calls ---

    def on_parallel(self, step: Fields) -> Fields:
        answers = [getattr(self, f"on_{call['event']}")(call) for call in step["calls"]]
        return {"counts": _counts(answers)}

    def on_race(self, step: Fields) -> Fields:
        run = getattr(self, f"on_{step['call']}")
        answers = [run({**step, "owner": f"{n:043d}"}) for n in range(step["owners"])]
        return {"counts": _counts(answers)}

    # --- changes of the world ---

    def on_set_key(self, step: Fields) -> Fields:
        before = self.keys[step["key"]]
        fields = {
            "id": before.id,
            "enabled": before.enabled,
            "scopes": before.scopes,
            "allowed_connections": before.allowed_connections,
        }
        after = _caller({name: step.get(name, value) for name, value in fields.items()})
        new = managed_connections([after]) - managed_connections(self.keys.values())
        self.listed_at |= dict.fromkeys(new, self.now)
        self.keys[after.id] = after
        managed = is_managed(after)
        self._apply(
            lease.withdraw(self.rows, after.id, is_managed=managed, allowed=after.allowed_connections, now=self.now)
        )
        return {}

    def on_set_connection(self, step: Fields) -> Fields:
        name = step.get("connection") or step["id"]
        self.connections[name]["state"] = step["state"]
        return {}

    def on_store_away(self, step: Fields) -> Fields:
        self.is_away = True
        return {}

    def on_kill_replica(self, step: Fields) -> Fields:
        return {}

    def on_skew_host_clock(self, step: Fields) -> Fields:
        return {}

    # --- inside ---

    def _call(self, step: Fields) -> LeaseCall:
        return LeaseCall(
            owner_hash=owner_hash(token_of(step["owner"])),
            api_key_id=step["key"],
            generation=step.get("generation", 0),
            provider="p",
            connection_id=step.get("connection") or "",
            ttl_ms=step.get("ttl_ms"),
            reason=EndReason(step["reason"]) if step.get("reason") else None,
        )

    def _rules(self, connection: str) -> LeaseRules:
        return LeaseRules(self.delay, listed_at=self.listed_at.get(connection))

    def _pool(self) -> list[Candidate]:
        present = (each for each in self.connections.values() if each["state"] != "absent")
        return [Candidate(each["id"], _BLOCKED.get(each["state"], Blocked.OTHER)) for each in present]

    def _plan(self, request: ManagedRequest) -> LeasePlan:
        return lease_selection.plan(request, self._pool(), self.rows, self._rules, self.now)

    def _take(self, plan: LeasePlan, request: ManagedRequest, call: LeaseCall) -> LeaseStep | None:
        candidates = list(plan.candidates)
        while candidates:
            pick = self.pin if self.pin in candidates else candidates[0]
            asked = replace(call, connection_id=pick, provider="p")
            step = claim(request, self.rows, asked, self._rules(pick), self.now)
            if after_claim(step.result) is not ClaimVerdict.PICK_AGAIN:
                return step
            candidates.remove(pick)
        return None

    def _dead_end(self, plan: LeasePlan, request: ManagedRequest) -> Fields:
        if plan.invalidate is not None and request.own is not None:
            own = request.own
            call = LeaseCall(own.owner_hash, own.api_key_id, own.generation, reason=plan.invalidate)
            self._apply(lease.invalidate(self.rows, call, self.now).writes)
        answer: Fields = {"verdict": "Reject", "capacity_state": plan.capacity is not None}
        answer["exclusions"] = _exclusions(plan)
        if plan.code is not None and (plan.capacity is not None or request.is_acquire):
            answer |= _refused(LeaseRefusal(plan.code))
        if plan.capacity is not None:
            shown = {
                name: getattr(plan.capacity, name)
                for name in ("state", "reason", "eligible_count", "free_count", "retry_after_s")
            }
            answer |= {"capacity": shown} | {name: shown[name] for name in shown if name not in ("state", "reason")}
        return answer

    def _stored(self, step: LeaseStep) -> Fields:
        self._apply(step.writes)
        answer: Fields = {"result": step.result}
        if step.free_at is not None:
            answer["free_at_ms"] = step.free_at
        row = step.lease
        if row is not None:
            answer |= {"generation": row.generation, "expires_at_ms": row.expires_at}
            answer["lease"] = {"connection": row.connection_id, "key": row.api_key_id, "generation": row.generation}
        return answer

    def _apply(self, writes: tuple[LeaseRow, ...]) -> None:
        for row in writes:
            if row.id == lease.NEW_ROW:
                self.rows.append(replace(row, id=len(self.rows) + 1))
            else:
                self.rows[row.id - 1] = row
        for kind in ("connection_id", "owner_hash"):
            active = Counter(getattr(row, kind) for row in self.rows if row.state is LeaseState.ACTIVE)
            self.peaks[kind] = max(self.peaks[kind], max(active.values(), default=0))

    def state(self, _: Any = ()) -> Fields:
        return {
            "active": sum(row.state is LeaseState.ACTIVE for row in self.rows),
            "max_active_per_connection": self.peaks["connection_id"],
            "max_active_per_owner": self.peaks["owner_hash"],
            "rows": [self._shown(row) for row in self.rows],
        }

    def _shown(self, row: LeaseRow) -> Fields:
        return {
            "owner_hash": row.owner_hash,
            "key": row.api_key_id,
            "connection": row.connection_id,
            "generation": row.generation,
            "state": row.state,
            "end_reason": row.end_reason,
        }


def _refused(refusal: Refused) -> Fields:
    answer: Fields = {"code": refusal.code, "http_status": refusal.http_status, "verdict": "Reject"}
    return answer | ({"grpc": refusal.grpc} if isinstance(refusal, LeaseRefusal) else {})


def _counts(answers: list[Fields]) -> dict[str, int]:
    return dict(Counter(str(answer.get("result") or answer.get("code") or answer.get("verdict")) for answer in answers))


def _exclusions(plan: LeasePlan) -> list[Fields]:
    return [
        {"connection": each.connection, "mechanism": "lease", "reason": str(each.reason)} for each in plan.exclusions
    ]
