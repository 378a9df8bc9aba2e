"""Pins, connections and replicas for the vectors of spec/affinity.md. No time but the steps'."""

from __future__ import annotations

from typing import Any

from policy_service.domain.affinity import (
    OnIneligible,
    PinDecision,
    PinEvent,
    PinQuery,
    PinRow,
    PoolMember,
    Standing,
    choose,
    choose_forced,
    is_evicted,
    join,
    refreshed,
)
from policy_service.domain.session_key import session_hash

Fields = dict[str, Any]
_STANDINGS = {
    "eligible": Standing.ELIGIBLE,
    "terminal": Standing.PERMANENT,
    "disabled": Standing.PERMANENT,
    "deleted": Standing.PERMANENT,
    "not_allowed": Standing.PERMANENT,
    "absent": Standing.PERMANENT,
}
"""Every other state is temporary."""
_PinKey = tuple[str, str]


def _standing(state: str) -> Standing:
    return _STANDINGS.get(state, Standing.TEMPORARY)


class AffinityWorld:
    """One table of pins; a replica's view of it is what is committed, unless a step says otherwise."""

    def __init__(self, given: Fields) -> None:
        self.now = 0
        settings = given.get("settings", {})
        self.ttl = settings.get("ttl_ms", 1_000_000)
        self.mode = OnIneligible(settings.get("on_ineligible", "detour"))
        self.require_caller = given.get("require_caller", False)
        self.managed = given.get("managed", False)
        self.connections: dict[str, Fields] = {each["id"]: dict(each) for each in given.get("connections", ())}
        self.strategy = given.get("account_strategy", "fill-first")
        self.pins: dict[_PinKey, PinRow] = {}
        self.last_key: _PinKey = ("u1", session_hash("p", "s1"))
        for pin in given.get("pins", ()):
            self._given_pin(pin)

    def _given_pin(self, pin: Fields) -> None:
        key = self._key(pin)
        used = pin["last_used_at_ms"]
        self.pins[key] = PinRow(key[0], "p", key[1], pin["connection"], used, used, pin["expires_at_ms"], 1)

    def run(self, step: Fields) -> Fields:
        """One step; the answer has the field names of the vectors."""
        self.now = step.get("at_ms", self.now)
        answer: Fields = getattr(self, f"on_{step['event']}")(step)
        pin = self.pins.get(self.last_key)
        live = pin if pin is not None and pin.is_live(self.now) else None
        shown = {"pin": live.connection_id if live else None, "expires_at_ms": live.expires_at if live else None}
        return {**shown, **answer}

    def on_select(self, step: Fields) -> Fields:
        key = self._key(step)
        seen = None if "view" in step else self.pins.get(key)
        return self._select(step, key, seen)

    def _select(self, step: Fields, key: _PinKey, seen: PinRow | None) -> Fields:
        query = PinQuery(key[0], "p", key[1], self.ttl, self.mode, self.require_caller)
        pool = self._pool()
        pinned = _standing(self.connections.get(seen.connection_id, {}).get("state", "absent")) if seen else None
        forced = step.get("force_connection")
        if forced:
            decision = choose_forced(query, seen, forced, pool, self.now, managed=self.managed)
        else:
            decision = choose(query, seen, pinned or Standing.ELIGIBLE, pool, self.now)
        return self._serve(self._write(decision, key, pool), pool)

    def _write(self, decision: PinDecision, key: _PinKey, pool: list[PoolMember]) -> PinDecision:
        """The conditional statement: no row touched means that another replica won."""
        if decision.write is None or decision.row is None:
            return decision
        present = self.pins.get(key)
        if present is not None and present.is_live(self.now) and present.version != decision.row.version:
            return join(present, pool)
        version = 1 + (present.version if present else 0)
        row = decision.row
        self.pins[key] = PinRow(
            row.api_key_id,
            row.provider,
            row.session_hash,
            row.connection_id,
            row.created_at,
            row.last_used_at,
            row.expires_at,
            version,
        )
        return decision

    def _serve(self, decision: PinDecision, pool: list[PoolMember]) -> Fields:
        connection = decision.connection or next((member.connection for member in pool), None)
        if connection in self.connections:
            used = self.connections[connection]
            used["last_used_at_ms"] = self.now
            if decision.consecutive is not None:
                used["consecutive"] = decision.consecutive
        return {"connection": connection, "affinity": decision.affinity}

    def on_first_byte(self, step: Fields) -> Fields:
        key = self._key(step)
        pin = refreshed(self.pins.get(key), step["connection"], self.now, self.ttl)
        if pin is not None:
            self.pins[key] = pin
        return {"written": pin is not None}

    def on_failure(self, step: Fields) -> Fields:
        state = step.get("then", "eligible")
        if step["connection"] in self.connections:
            self.connections[step["connection"]]["state"] = state
        return self._event(PinEvent.FAILURE, step, _standing(state))

    def on_route_timeout(self, step: Fields) -> Fields:
        return self._event(PinEvent.ROUTE_TIMEOUT, step)

    def on_client_abort(self, step: Fields) -> Fields:
        return self._event(PinEvent.CLIENT_ABORT, step)

    def on_hedge_cancelled(self, step: Fields) -> Fields:
        return self._event(PinEvent.HEDGE_CANCELLED, step)

    def on_local_refusal(self, step: Fields) -> Fields:
        return self._event(PinEvent.LOCAL_REFUSAL, step)

    def _event(self, event: PinEvent, step: Fields, after: Standing = Standing.ELIGIBLE) -> Fields:
        key = self._key(step)
        pin = self.pins.get(key)
        if pin is not None and is_evicted(event, pin, step["connection"], after, self.mode):
            del self.pins[key]
        return {"written": False}

    def on_set_connection(self, step: Fields) -> Fields:
        self.connections[step["id"]]["state"] = step["state"]
        return {}

    def on_kill_replica(self, step: Fields) -> Fields:
        return {}

    def on_parallel(self, step: Fields) -> Fields:
        """All calls decide on what was committed before any of them."""
        keys = [self._key(call) for call in step["calls"]]
        seen = [self.pins.get(key) for key in keys]
        answers = [self._select(*each) for each in zip(step["calls"], keys, seen, strict=True)]
        return {
            "affinities": sorted(str(answer["affinity"]) for answer in answers),
            "distinct_connections": len({answer["connection"] for answer in answers}),
            "pins": len(self.pins),
        }

    def _key(self, step: Fields) -> _PinKey:
        caller = step.get("caller", "u1") or ""
        self.last_key = (caller, session_hash("p", step.get("session", "s1")))
        return self.last_key

    def _pool(self) -> list[PoolMember]:
        eligible = (each for each in self.connections.values() if each.get("state", "eligible") == "eligible")
        return [
            PoolMember(
                each["id"],
                each.get("priority"),
                each.get("last_used_at_ms"),
                each.get("consecutive", 0),
                each.get("max_sessions"),
                sum(pin.connection_id == each["id"] and pin.is_live(self.now) for pin in self.pins.values()),
            )
            for each in eligible
        ]
