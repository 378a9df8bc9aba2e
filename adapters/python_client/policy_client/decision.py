"""A decision as the state machine keeps it, and the attempt that is under way. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policy_client import messages, outcomes
from policy_client._generated.policy.v1 import permit_pb2
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Hold

SLOTS = frozenset({permit_pb2.PERMIT_KIND_CONCURRENCY, permit_pb2.PERMIT_KIND_QUEUE})
NOT_ENDED = outcomes.http(0)
PROBE_LIFE_MS = 30_000
"""Life of a probe permit that states no end: the default reset time of a breaker."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Targets to go to in order, from the service or from what was last known of it."""

    targets: tuple[messages.Target, ...]
    received_at: int
    dispatch: messages.Dispatch
    token: bytes = b""
    decided_at_unix_ms: int = 0

    @property
    def is_local(self) -> bool:
        return not self.token

    @property
    def holds_grants(self) -> bool:
        """Permits or a probe: something that others wait for until it is freed."""
        return bool(self.dispatch.permits) or self.dispatch.probe

    @property
    def holds_slots(self) -> bool:
        """Places of a gate, which a retry of the same target still needs."""
        return any(permit.kind in SLOTS for permit in self.dispatch.permits)

    @property
    def hold(self) -> Hold | None:
        """What has to be renewed at a third of its life; probes without an end of their own every 10 s."""
        if not (self.dispatch.permits or self.dispatch.probe):
            return None
        lives = [permit.expires_at_unix_ms - self.decided_at_unix_ms for permit in self.dispatch.permits]
        return Hold(self.token, max(300, min([life for life in lives if life > 0], default=PROBE_LIFE_MS) // 3))

    def place_of(self, target: messages.Target) -> int | None:
        """Where a target stands; None where it is none of the decision."""
        wanted = identity(target)
        return next((place for place, each in enumerate(self.targets) if identity(each) == wanted), None)


def identity(target: messages.Target | messages.Candidate) -> tuple[str, str, str]:
    """Provider, connection and model."""
    return target.provider, target.connection, target.model


@dataclass(frozen=True, slots=True)
class Under:
    """The attempt that is under way: its place in the decision, when it was called, how it ended."""

    attempt: Attempt
    place: int
    called_at: int = 0
    ended: Answer[Any] | BaseException | None = None
    outcome: Outcome = NOT_ENDED
    is_final: bool = False
    """Its report ended the decision: nothing is left to free."""
