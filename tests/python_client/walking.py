"""Walks a journey step by step with a clock of the test's own, as a shell would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from policy_client import messages, steps
from policy_client._generated.policy.v1 import permit_pb2
from policy_client.journey import Turn, begin
from policy_client.steps import Budget, answered
from policy_client.testing import target

S = TypeVar("S")

POOL = messages.pool("openai/main/gpt", "openai/spare/gpt")
FALL_BACK = messages.ACTION_KIND_FALL_BACK
RETURN = messages.ACTION_KIND_RETURN_TO_CLIENT


def decided(first: str, *fallbacks: str, token: bytes = b"token", **fields: Any) -> steps.Selected:
    """SelectTarget answered with a Dispatch."""
    dispatch = messages.Dispatch(target=target(first), fallbacks=map(target, fallbacks), **fields)
    return steps.Selected(messages.SelectTargetResponse(decision_token=token, dispatch=dispatch))


def told_to_wait(wait_ms: int, **fields: Any) -> steps.Selected:
    wait = messages.Wait(wait_ms=wait_ms, reason_text="rate_limit", **fields)
    return steps.Selected(messages.SelectTargetResponse(decision_token=b"waiting", wait=wait))


def rejected(status: int = 503) -> steps.Selected:
    reject = messages.Reject(http_status=status, code="all_targets_skipped")
    return steps.Selected(messages.SelectTargetResponse(reject=reject))


def judged(kind: Any, next_target: str = "", **fields: Any) -> steps.Reported:
    """ReportOutcome answered with an action."""
    action = messages.Action(kind=kind, **fields)
    if next_target:
        action.next_target.CopyFrom(target(next_target))
    return steps.Reported(messages.ReportOutcomeResponse(action=action))


def slot(expires_at_unix_ms: int = 0) -> messages.Permit:
    return messages.Permit(
        permit_id="p", kind=permit_pb2.PERMIT_KIND_CONCURRENCY, expires_at_unix_ms=expires_at_unix_ms
    )


def status(code: int, body: bytes = b"") -> steps.Answered[str]:
    """The upstream answered; the value says which status it was."""
    return steps.Answered(answered(f"{code}", code, body=body or (b"{}" if code >= 400 else b"")))


@dataclass
class Walk:
    """A journey under way. `seen` keeps every step, `behind` everything that was sent behind."""

    asked: messages.SelectTargetRequest = field(default_factory=lambda: POOL)
    budget: Budget = field(default_factory=Budget)
    now: int = 1_000

    def __post_init__(self) -> None:
        self.turn: Turn[str] = begin(self.asked, self.budget, "id", self.now)
        self.seen: list[Any] = [self.turn.step]
        self.behind: list[Any] = list(self.turn.behind)

    def on(self, event: steps.Event[str], after_ms: int = 0) -> Any:
        """The step that follows an event."""
        self.now += after_ms
        self.turn = self.turn.journey.advance(event, self.now)
        self.seen.append(self.turn.step)
        self.behind += self.turn.behind
        return self.turn.step

    def follow(self, *events: steps.Event[str]) -> Any:
        """The step that follows several events."""
        return [self.on(event) for event in events][-1]

    def reports(self) -> list[messages.ReportOutcomeRequest]:
        """All reports, in order of the steps, those sent behind last."""
        asked = [step.request for step in self.seen if isinstance(step, steps.Report)]
        return asked + [each.request for each in self.behind if isinstance(each, steps.BehindReport)]


def names(targets: Sequence[messages.Target]) -> list[str]:
    return ["/".join((each.provider, each.connection, each.model)) for each in targets]


def is_a(step: Any, kind: type[S]) -> S:
    """The step, which must be of a kind."""
    assert isinstance(step, kind), step
    return step
