"""What one reported outcome means before any state is looked at: status restated, text read, verdict of the pipeline.

Depends on the outcome and the policy alone. An event is folded at least twice (on the view, under the lock) and
judged once for its answer; its meaning is found once.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_service.application.events import OutcomeEvent
from policy_service.domain.classification import classify_reading
from policy_service.domain.decision_record import Classification
from policy_service.domain.guards import local_guard
from policy_service.domain.outcome import Outcome
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.reading import Reading
from policy_service.domain.restatement import Restated, restate
from policy_service.domain.verdict import Verdict, judge_reading

UNREADABLE = "unreadable"
REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class Meaning:
    """One failed outcome, read. `guard` is the local guard that ends the evaluation; empty without one."""

    policy: ConnectionPolicy
    outcome: Outcome
    """With the target's names and the restated status."""
    restated: Restated | None
    reading: Reading
    guard: str
    found: Classification
    """Without the rotation gate, whose count is state."""

    @property
    def verdict(self) -> Verdict:
        """Public verdict."""
        return judge_reading(self.reading, "" if self.guard == UNREADABLE else self.guard, self.found)


_known: dict[str, tuple[OutcomeEvent, Policy, Meaning]] = {}


def meaning_of(event: OutcomeEvent, policy: Policy) -> Meaning:
    """Meaning of a failure; remembered for the event object and the policy revision at hand."""
    found = _known.get(event.event_id)
    if found is not None and found[0].outcome is event.outcome and found[1] is policy:
        return found[2]
    meaning = _read(event, policy)
    if len(_known) >= REMEMBERED:
        _known.clear()
    _known[event.event_id] = (event, policy, meaning)
    return meaning


def named_outcome(event: OutcomeEvent) -> Outcome:
    """The outcome with the names of the served target."""
    outcome = event.outcome
    if (outcome.provider, outcome.connection, outcome.model) == event.target:
        return outcome
    provider, connection, model = event.target
    return outcome._replace(provider=provider, connection=connection, model=model)


def _read(event: OutcomeEvent, policy: Policy) -> Meaning:
    outcome = named_outcome(event)
    applies = policy.for_connection(event.target.provider, event.target.connection, outcome.auth_class)
    restated = _restated(outcome, applies, event.at)
    if restated is not None and restated.rule_id is not None:
        outcome = outcome._replace(status=restated.status)
    reading = Reading(outcome, applies, event.at)
    guard = local_guard(outcome, applies) or (UNREADABLE if outcome.status is None else "")
    return Meaning(applies, outcome, restated, reading, guard, classify_reading(reading))


def _restated(outcome: Outcome, policy: ConnectionPolicy, at: int) -> Restated | None:
    """Only answers with a status line of their own are restated, no error inside a 200."""
    status = outcome.status
    if outcome.is_success or status is None or outcome.network_error or outcome.is_error_in_success:
        return None
    hint = Reading(outcome, policy, at).hint
    return restate(policy.provider, status, outcome.message, outcome.body, hint.wait_ms if hint else None)
