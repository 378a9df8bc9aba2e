"""What the demo knows from the service's answers alone: breakers, blocks with their ends, decisions, outcomes."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from policy_service.cli.demo.client import Reported, Selected, Target
from policy_service.cli.demo.http_call import HttpResult
from policy_service.cli.demo.script import CONNECTIONS
from policy_service.cli.demo.traffic import ClientRequest
from policy_service.generated.policy.v1 import policy_pb2

_KEPT: Final = 24
_MERGED: Final = 6
"""How far back entries of the same kind are looked for."""
TERMINAL: Final = ("banned", "expired", "credits_exhausted", "deactivated")


@dataclass(frozen=True, slots=True)
class Block:
    """Why a connection is out. `until` in database time, ms; 0: no end is known. `length_ms`: as first heard."""

    reason: str
    until: int = 0
    length_ms: int = 0


@dataclass(frozen=True, slots=True)
class Breaker:
    """Breaker of a provider as last announced."""

    state: str = "CLOSED"
    until: int = 0
    length_ms: int = 0
    trips: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of SelectTarget. `verdict`: `dispatch`, `wait` or `reject`; `others`: targets out, with the reason."""

    at_s: float
    route: str
    verdict: str
    where: str
    why: str
    others: tuple[tuple[str, Block], ...]
    times: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Decisions of one kind are shown once, with their number."""
        return (
            self.route,
            self.verdict,
            self.where,
            self.why,
            tuple((name, block.reason) for name, block in self.others),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer of ReportOutcome to a failure, or to a success that changed something."""

    at_s: float
    connection: str
    came_back: str
    restated: str
    reason: str
    action: str
    effects: tuple[str, ...]
    times: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """Outcomes of one kind are shown once, with their number."""
        return self.connection, self.came_back, self.reason, self.action, self.effects


Entry = TypeVar("Entry", Decision, Outcome)


@dataclass(slots=True)
class Board:
    """Keeps the newest of everything. `started`: monotonic start of the traffic."""

    started: float = 0.0
    breakers: dict[str, Breaker] = field(default_factory=lambda: {name: Breaker() for name in CONNECTIONS.values()})
    blocks: dict[str, Block] = field(default_factory=dict)
    """By connection."""
    causes: dict[str, str] = field(default_factory=dict)
    """Newest verdict reason by connection."""
    decisions: deque[Decision] = field(default_factory=lambda: deque(maxlen=_KEPT))
    outcomes: deque[Outcome] = field(default_factory=lambda: deque(maxlen=_KEPT))
    verdicts: Counter[str] = field(default_factory=Counter)
    mechanisms: Counter[str] = field(default_factory=Counter)
    """Transitions recorded, by mechanism."""
    restated: int = 0
    _offset_ms: float = 0.0
    _heard: set[str] = field(default_factory=set)

    # -- told by the gateway -------------------------------------------------------------------------
    def selected(self, request: ClientRequest, answer: Selected) -> None:
        """A decision was made."""
        self._offset_ms = answer.decided_at_unix_ms - time.monotonic() * 1000
        others = tuple((each.target.connection, _block(each)) for each in answer.exclusions)
        for each, (connection, block) in zip(answer.exclusions, others, strict=True):
            self._see(connection, block)
            self._infer(each.target.provider, block)
        kind = answer.WhichOneof("verdict") or ""
        if kind == "dispatch":
            self._clear(answer)
        self.verdicts[kind] += 1
        _add(self.decisions, Decision(self._elapsed(), request.route, kind, *_said(answer), others))

    def reported(self, request: ClientRequest, target: Target, result: HttpResult, answer: Reported) -> None:
        """An outcome was judged."""
        for effect in answer.effects:
            self._apply(effect, target)
        if not result.is_success:
            self.causes[target.connection] = answer.verdict.reason_text
        if result.is_success and not answer.effects:
            return
        restated = answer.verdict.restated_status if answer.verdict.HasField("restated_status") else 0
        self.restated += bool(restated)
        _add(self.outcomes, self._outcome(target, result, answer))

    # -- read by the display -------------------------------------------------------------------------
    def left_ms(self, until: int) -> int:
        """Time until an instant of the database's clock."""
        return max(0, round(until - time.monotonic() * 1000 - self._offset_ms)) if until else 0

    def breaker(self, provider: str) -> Breaker:
        """The breaker now: OPEN turns HALF_OPEN by time alone."""
        known = self.breakers[provider]
        is_over = known.state == "OPEN" and not self.left_ms(known.until)
        return Breaker("HALF_OPEN", 0, 0, known.trips) if is_over else known

    def block(self, connection: str) -> Block | None:
        """What keeps the connection out now, if anything does."""
        known = self.blocks.get(connection)
        if known is None or (known.until and not self.left_ms(known.until)):
            return None
        return known

    # -- inside --------------------------------------------------------------------------------------
    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _see(self, connection: str, block: Block) -> None:
        """Of a block that is already known, keep the length as first heard."""
        known = self.blocks.get(connection)
        same = known is not None and known.until == block.until
        self.blocks[connection] = replace(block, length_ms=known.length_ms) if known and same else block

    def _infer(self, provider: str, block: Block) -> None:
        """An exclusion can tell of a breaker before the report that tripped it is answered."""
        known = self.breakers[provider]
        if block.reason == "circuit_open" and block.until > known.until:
            self.breakers[provider] = replace(known, state="OPEN", until=block.until, length_ms=block.length_ms)

    def _clear(self, answer: Selected) -> None:
        """Targets that a decision offers are not blocked, whatever was known before."""
        for target in (answer.dispatch.target, *answer.dispatch.fallbacks):
            self.blocks.pop(target.connection, None)

    def _apply(self, effect: policy_pb2.Effect, target: Target) -> None:
        if effect.fact_id in self._heard:
            return
        self._heard.add(effect.fact_id)
        self.mechanisms[effect.mechanism_text] += 1
        if effect.mechanism_text == "breaker":
            self._trip(effect, target)
        elif effect.to_state in TERMINAL:
            self._see(target.connection, Block(effect.to_state))
        elif effect.until_at_unix_ms:
            length = self.left_ms(effect.until_at_unix_ms)
            self._see(target.connection, Block(effect.mechanism_text, effect.until_at_unix_ms, length))

    def _outcome(self, target: Target, result: HttpResult, answer: Reported) -> Outcome:
        verdict = answer.verdict
        restated = str(verdict.restated_status) if verdict.HasField("restated_status") else ""
        reason = "success" if verdict.success else verdict.reason_text
        effects = tuple(self._told(each) for each in answer.effects)
        return Outcome(
            self._elapsed(), target.connection, result.text, restated, reason, answer.action.kind_text, effects
        )

    def _told(self, effect: policy_pb2.Effect) -> str:
        """A transition in words, with its end."""
        change = f"{effect.mechanism_text} {effect.from_state} → {effect.to_state}"
        left = self.left_ms(effect.until_at_unix_ms)
        return f"{change} for {left / 1000:.1f} s" if left else change

    def _trip(self, effect: policy_pb2.Effect, target: Target) -> None:
        before = self.breakers.get(target.provider, Breaker())
        until, state = effect.until_at_unix_ms, effect.to_state.upper()
        trips = before.trips + (state == "OPEN")
        self.breakers[target.provider] = Breaker(state, until, self.left_ms(until), trips)


def _add(entries: deque[Entry], new: Entry) -> None:
    """Newest last; an entry of the same kind among the last few moves up instead of being repeated."""
    for old in list(entries)[-_MERGED:]:
        if old.kind == new.kind:
            entries.remove(old)
            new = replace(new, times=old.times + 1)
            break
    entries.append(new)


def _block(exclusion: policy_pb2.Exclusion) -> Block:
    return Block(exclusion.reason_text, exclusion.until_at_unix_ms, exclusion.remaining_ms)


def _said(answer: Selected) -> tuple[str, str]:
    """Where to, and why."""
    if answer.HasField("dispatch"):
        why = answer.explanation.chosen_by
        return answer.dispatch.target.connection, "probe" if answer.dispatch.probe else why
    if answer.HasField("wait"):
        return f"{answer.wait.wait_ms / 1000:.1f} s", answer.wait.reason_text
    return str(answer.reject.http_status), answer.reject.code
