"""The compact result of one report: what is answered now, and again to every repetition (spec/fleet.md section 1).

Made of the fold's result; stored with the idempotency key in the transaction that folds the event.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from policy_service.application.events import OutcomeEvent
from policy_service.application.messages import Effect, Verdict
from policy_service.application.report_plan import FoldResult, fold
from policy_service.application.wall_plan import MECHANISM, WallAnswer, intercept
from policy_service.domain.facts import Fact
from policy_service.domain.failure_kinds import failure_kind
from policy_service.domain.ids import Instant
from policy_service.domain.policy import Policy
from policy_service.domain.restatement import Restated
from policy_service.domain.state import StateBook

MAX_EFFECTS = 64
"""An exhausted address may cool many siblings; the answer names this many transitions, the facts all of them."""

_SCOPES = {
    "model_lockout": "model",
    "connection_cooldown": "connection",
    "connection_terminal": "connection",
    "provider_failure": "provider",
}


@dataclass(frozen=True, slots=True)
class ReportResult:
    """Everything that the answer to one report needs; `facts` are for the transaction and are not kept here."""

    is_success: bool = False
    reason: str = "none"
    scope: str = "none"
    fallback: bool = False
    restated_status: int | None = None
    retry_after_ms: int | None = None
    terminal_state: str = ""
    rule: str = ""
    rule_id: str = ""
    hint_source: str = ""
    cooldown_ms: int = 0
    failure_kind: str = ""
    ignored: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    has_effect: bool = False
    is_local: bool = False
    wall: WallAnswer | None = None
    """What the usage wall said; None where it is not concerned."""
    facts: tuple[Fact, ...] = ()


class Preview(NamedTuple):
    """What a report would mean, without any state."""

    verdict: Verdict
    result: ReportResult
    breaker_kind: str = ""
    """Kind of its text (spec/classification.md section 5); empty for a success."""
    reason_label: str = ""
    """Reason for listings; empty for a success."""


_KEPT = tuple(f.name for f in fields(ReportResult) if f.name != "facts")


def fold_report(
    book: StateBook, event: OutcomeEvent, policy: Policy, now: Instant | None = None, replicas: int | None = None
) -> ReportResult:
    """Fold one event and keep what its reporter is told.

    Args:
        now: time of the transaction; None: the event's own (a projection).
        replicas: replicas alive, for the evidence quorum; None: unknown.
    """
    asked = intercept(book, event, policy, now) if event.wall is not None else None
    if asked is None:
        return _result(event, fold(book, event, policy, now=now, replicas=replicas))
    wall, facts = asked
    if wall.intercepts:
        effects = tuple(map(_effect, facts))
        return ReportResult(reason=MECHANISM, effects=effects, has_effect=True, facts=facts, wall=wall)
    return _beside(_result(event, fold(book, event, policy, now=now, replicas=replicas)), wall, facts)


def _beside(result: ReportResult, wall: WallAnswer, facts: tuple[Fact, ...]) -> ReportResult:
    """The ordinary result of a response that the wall let through, with what the wall noted."""
    effects = tuple(map(_effect, facts))
    return replace(result, wall=wall, effects=(*effects, *result.effects), facts=(*facts, *result.facts))


def _result(event: OutcomeEvent, folded: FoldResult) -> ReportResult:
    verdict = event.verdict
    common = {
        "ignored": folded.causes,
        "effects": tuple(map(_effect, folded.facts[:MAX_EFFECTS])),
        "has_effect": folded.has_effect,
        "facts": folded.facts,
    }
    if folded.is_success or verdict is None:
        return ReportResult(is_success=folded.is_success, **common)  # type: ignore[arg-type]
    record, restated = folded.record, folded.restated
    return ReportResult(
        reason=verdict.reason,
        scope="local" if folded.guard else _SCOPES.get(verdict.scope, "request"),
        fallback=verdict.fallback,
        restated_status=restated.status if restated and restated.rule_id else None,
        retry_after_ms=(restated.retry_after_ms if restated else None) or verdict.retry_after_ms,
        terminal_state=verdict.terminal or "",
        rule=verdict.rule,
        rule_id=(record.rule_id or "" if record else "") or (restated.rule_id or "" if restated else ""),
        hint_source=str(record.retry_hint_source or "") if record else "",
        cooldown_ms=record.cooldown_ms if record else 0,
        failure_kind="" if folded.guard else failure_kind(_status(event, restated), verdict.reason),
        is_local=bool(folded.guard),
        **common,  # type: ignore[arg-type]
    )


def _status(event: OutcomeEvent, restated: Restated | None) -> int | None:
    return event.outcome.status if restated is None else restated.status


def _effect(fact: Fact) -> Effect:
    return Effect(fact.id, fact.mechanism, fact.key, fact.from_state, fact.to_state, fact.deadline_at, fact.generation)


def encode(result: ReportResult) -> bytes:
    """Compact JSON without the facts."""
    kept = {name: value for name in _KEPT if (value := getattr(result, name))}
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False).encode()


def decode(data: bytes) -> ReportResult:
    """The result; fields that this release does not know are passed over."""
    values = json.loads(data)
    known = {name: values[name] for name in ReportResult.__dataclass_fields__ if name in values}
    known["effects"] = tuple(Effect(*effect) for effect in known.get("effects", ()))
    known["ignored"] = tuple(known.get("ignored", ()))
    if "wall" in known:
        known["wall"] = _wall(known["wall"])
    return ReportResult(**known)


def _wall(values: list[Any]) -> WallAnswer:
    """Positions that this release does not know are cut off."""
    wall = WallAnswer(*values[: len(WallAnswer._fields)])
    return wall if wall.window is None else wall._replace(window=(wall.window[0], wall.window[1], wall.window[2]))
