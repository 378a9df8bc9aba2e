"""The fact: one recorded state transition with its evidence (spec/README.md, Facts).

Pure data. A fact's id is derived from the event that caused it, so folding the same event again
(a retried commit, a projection) yields the same id.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_service.domain.ids import DurationMs, Instant


@dataclass(frozen=True, slots=True)
class Fact:
    """One transition. `deadline_at` is the end the transition set; None where there is none."""

    id: str
    at: Instant
    mechanism: str
    key: str
    from_state: str
    to_state: str
    provider: str = ""
    connection: str = ""
    model: str = ""
    generation: int = 1
    deadline_at: Instant | None = None
    decision_id: str = ""
    request_id: str = ""
    status: int | None = None
    restated_status: int | None = None
    reason: str = ""
    rule_id: str | None = None
    hint_source: str | None = None
    hint_ms: DurationMs | None = None
    replica: str = ""
    actor: str = ""
    failure_count: int | None = None
    """Count after the transition, where the mechanism counts (breaker.md section 2, history)."""
    rule: str = ""
    """Row of the verdict or of the classification that decided; `rule_id` names a provider's or operator's rule."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What a transition is blamed on: copied into each fact it makes."""

    event_id: str
    at: Instant
    replica: str = ""
    decision_id: str = ""
    request_id: str = ""
    status: int | None = None
    restated_status: int | None = None
    reason: str = ""
    rule_id: str | None = None
    hint_source: str | None = None
    hint_ms: DurationMs | None = None
    actor: str = ""
    rule: str = ""


class FactLog:
    """Facts of one event, in order, with ids `<event id>.<n>`."""

    def __init__(self, cause: Cause) -> None:
        self.cause = cause
        self.facts: list[Fact] = []

    def next_id(self) -> str:
        """Id that the next fact will get; rows keep it as their evidence."""
        return f"{self.cause.event_id}.{len(self.facts)}"

    def add(
        self,
        mechanism: str,
        key: str,
        from_state: str,
        to_state: str,
        *,
        provider: str = "",
        connection: str = "",
        model: str = "",
        generation: int = 1,
        deadline_at: Instant | None = None,
        reason: str | None = None,
        failure_count: int | None = None,
    ) -> Fact:
        """Append one fact; `reason` overrides the reason of the cause."""
        cause = self.cause
        fact = Fact(
            id=self.next_id(),
            at=cause.at,
            mechanism=mechanism,
            key=key,
            from_state=from_state,
            to_state=to_state,
            provider=provider,
            connection=connection,
            model=model,
            generation=generation,
            deadline_at=deadline_at,
            decision_id=cause.decision_id,
            request_id=cause.request_id,
            status=cause.status,
            restated_status=cause.restated_status,
            reason=cause.reason if reason is None else reason,
            rule_id=cause.rule_id,
            hint_source=cause.hint_source,
            hint_ms=cause.hint_ms,
            replica=cause.replica,
            actor=cause.actor,
            failure_count=failure_count,
            rule=cause.rule,
        )
        self.facts.append(fact)
        return fact
