"""Pool-guard vectors: soft exclusions of the members of one pool (spec/guards.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policy_service.domain.catalogue import Catalogue
from policy_service.domain.connection_state import TERMINAL_STATES
from policy_service.domain.ids import SERVER_STATED
from policy_service.domain.policy import Policy
from policy_service.domain.pool_guard import Member, PoolVerdict, judge_pool
from tests.vectors.matching import assert_expected
from tests.vectors.rows import stored_settings
from tests.vectors.step_fields import POOL, WORLD_GIVEN, check_fields, check_given


class PoolWorld:
    """Members in order, and the calls under way in panic mode."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        catalogue = Catalogue(stored_settings=stored_settings(given.get("settings", {})))
        self.profile = Policy(catalogue, environment=given.get("env", {})).pool_guard
        self.members = {name: Member(name) for name, traits in given["pool"].items() if not _is_out(traits or {})}
        self.overflowed = 0
        self.in_panic: set[str] = set()
        self.now = 0

    def play(self, step: Mapping[str, Any]) -> Mapping[str, Any]:
        """One step; what its expectations may name."""
        check_fields(step, POOL)
        self.now = int(step.get("at_ms", self.now))
        return {"exclude": self._exclude, "select": self._select, "outcome": self._end}[step["event"]](step)

    def _exclude(self, step: Mapping[str, Any]) -> Mapping[str, Any]:
        name = step["member"]
        fixed = step.get("source") in SERVER_STATED
        self.members[name] = replace(self.members[name], until=int(step["until_ms"]), since=self.now, fixed=fixed)
        self.overflowed += name in judge_pool(self._ordered(), self.profile, self.now).not_enforced
        return self.shown()

    def _end(self, step: Mapping[str, Any]) -> Mapping[str, Any]:
        """The call of an earlier selection is over; one of panic mode makes room for the next."""
        self.in_panic.discard(step["of"])
        return self.shown()

    def _select(self, step: Mapping[str, Any]) -> Mapping[str, Any]:
        verdict = self._judged()
        offered = verdict.selectable or verdict.panic
        is_panic = not verdict.selectable and bool(verdict.panic)
        if is_panic:
            self.in_panic.add(step.get("as", f"select-{self.now}-{len(self.in_panic)}"))
        chosen = offered[0] if offered else None
        return {**self.shown(), "selected": chosen, "panic": is_panic, "order": list(offered)}

    def shown(self) -> Mapping[str, Any]:
        """The pool as it stands."""
        verdict = self._judged()
        return {
            "excluded": list(verdict.excluded),
            "not_enforced": list(verdict.not_enforced),
            "facts_count": {"exclusion_overflow": self.overflowed, "any": self.overflowed},
        }

    def _judged(self) -> PoolVerdict:
        return judge_pool(self._ordered(), self.profile, self.now, len(self.in_panic))

    def _ordered(self) -> list[Member]:
        return list(self.members.values())


def _is_out(traits: Mapping[str, Any]) -> bool:
    """Terminal, disabled and foreign-leased targets are no members."""
    known = {"terminal", "disabled", "leased", "test_status", "active"}
    assert set(traits) <= known, f"traits of a member that nobody reads: {sorted(set(traits) - known)}"
    is_switched_off = not traits.get("active", True) or traits.get("test_status") in TERMINAL_STATES
    return is_switched_off or any(traits.get(name) for name in ("terminal", "disabled", "leased"))


def play_pool(vector: Mapping[str, Any]) -> None:
    """Play one pool vector; raises AssertionError on a mismatch."""
    check_given(vector["given"], WORLD_GIVEN)
    world = PoolWorld(vector["given"])
    last: Mapping[str, Any] = {}
    for step in vector["steps"]:
        shown = world.play(step)
        last = {**last, **shown}
        _check(shown, step.get("expect", {}))
    _check({**last, **world.shown()}, vector.get("expect", {}))


def _check(seen: Mapping[str, Any], expect: Mapping[str, Any]) -> None:
    assert_expected(expect, seen, "pool")
