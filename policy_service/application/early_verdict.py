"""The verdict of a probe whose answer has begun: alive, at once (spec/fleet.md section 3).

Nothing else of the outcome is known yet, so nothing else changes; the report of the attempt finds the permit used up.
"""

from __future__ import annotations

from collections.abc import Sequence

from policy_service.application.events import ProbeRef
from policy_service.application.ports import Scope, Unit, UnitResult
from policy_service.domain import breaker_burst
from policy_service.domain.breaker import BreakerState, Effect, State, split_name
from policy_service.domain.breaker_burst import BurstState
from policy_service.domain.breaker_controls import load_row
from policy_service.domain.breaker_probe import Evidence, HeldPermit, ProbeAnswer, judge
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import Instant, Target
from policy_service.domain.policy import Policy
from policy_service.domain.state import StateBook

BEGUN = 200
"""Status that a first byte stands for: a gateway reports it for good answers only."""


def probes_of(probes: Sequence[ProbeRef], served: Target) -> tuple[ProbeRef, ...]:
    """Probes that a first byte of `served` speaks for; one granted without the store is judged by its report alone."""
    found = ((split_name(ref.breaker_key), ref) for ref in probes if not ref.local)
    names = (served.provider, ""), (served.provider, served.connection)
    return tuple(ref for name, ref in found if name in names)


def first_byte_unit(probes: Sequence[ProbeRef], served: Target, cause: Cause, policy: Policy) -> Unit[int]:
    """The guarded transaction that judges the probes alive; its value is how many of them still had a say."""
    connections = frozenset({(served.provider, served.connection)}) if served.connection else frozenset()
    scope = Scope(frozenset({served.provider}), connections)

    def run(book: StateBook, now: Instant, _known: object) -> UnitResult[int]:
        facts = FactLog(cause)
        counted = sum(_judge(book, ref, served, policy, facts) for ref in probes)
        return UnitResult(counted, tuple(facts.facts))

    return Unit(scope, run)


def _judge(book: StateBook, ref: ProbeRef, served: Target, policy: Policy, facts: FactLog) -> bool:
    provider, part = split_name(ref.breaker_key)
    profile, at = policy.for_connection(provider, part).breaker, facts.cause.at
    before = load_row(book.get(BreakerState, provider, part), profile)
    held = HeldPermit(ref.permit_id, ref.generation, ref.local)
    after, _, effect = judge(before, held, ProbeAnswer(BEGUN, "", False, at), Evidence(at), profile, facts)
    book.put(after)
    if after.state is State.CLOSED and before.state is not State.CLOSED and served.connection:
        book.put(breaker_burst.clear(book.get(BurstState, provider, served.connection), at))
    return effect is Effect.COUNTED
