"""Reports at the usage wall for tests: the steps of ReportOutcome that concern it, over a real replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policy_service.application.events import OutcomeEvent
from policy_service.application.messages import (
    Action,
    ActionKind,
    DecisionToken,
    EndKind,
    LimitResetReport,
    ReportExtras,
    ReportRequest,
    TokenTarget,
)
from policy_service.application.ports import Store
from policy_service.application.replica import Replica, ReplicaSettings
from policy_service.application.report_result import ReportResult
from policy_service.application.usage_wall import UsageWall, action_of
from policy_service.domain.catalogue import Catalogue, Connection
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.usage_wall import RESPONSE_PREFIX
from policy_service.domain.usage_wall_state import Lane
from policy_service.settings.catalogue_file import builtin_catalogue
from tests.replicas import FakeTime, make_replica

C1 = Target(ProviderId("claude"), ConnectionId("c1"), ModelId("opus"))
ORDINARY = Action(ActionKind.FALL_BACK)
SLOW = (("anthropic-usage-limit", "slow"),)


def catalogue(**options: Any) -> Catalogue:
    """One Claude subscription with these options."""
    account = Connection("c1", "claude", AuthClass.OAUTH, **options)
    return Catalogue(providers=builtin_catalogue().providers, connections={"c1": account})


def unified(**headers: str) -> dict[str, str]:
    """Unified headers by suffix, `_` for `-`."""
    return {RESPONSE_PREFIX + name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True, slots=True)
class Answered:
    """What the gateway hears of one report."""

    action: Action
    result: ReportResult
    durable: bool


@dataclass
class Gateway:
    """A replica with its wall, and a caller of it."""

    replica: Replica
    wall: UsageWall
    time: FakeTime | None

    def now(self) -> int:
        return self.replica.clock.now()

    def wall_headers(self, **more: str) -> dict[str, str]:
        """A wall 429 with an offer, for a limit that resets in an hour."""
        reset = str((self.now() + 3_600_000) // 1_000)
        return unified(**{"status": "rejected", "reset": reset, "slow_offer": "treatment", **more})

    async def event(
        self, decision: str, status: int, attempt: int = 0, **fields: Any
    ) -> tuple[OutcomeEvent, ReportRequest]:
        headers = fields.pop("headers", {})
        extras = ReportExtras(**fields)
        token = DecisionToken(decision, self.now(), (TokenTarget(C1),))
        request = ReportRequest(
            C1, EndKind.HTTP_STATUS, token, attempt=attempt, status=status, headers=headers, extras=extras
        )
        served = self.replica.report._served(request)
        event = self.replica.report._event(request, served, self.now())
        return await self.wall.prepare(event, request), request

    async def report(self, decision: str, status: int = 429, attempt: int = 0, **fields: Any) -> Answered:
        event, _ = await self.event(decision, status, attempt, **fields)
        reported = await self.wall.settle(event, await self.replica.commit.report(event), self.replica.commit)
        return Answered(action_of(reported.result.wall, ORDINARY), reported.result, reported.durable)

    async def reset_step(self, decision: str, asked: Answered, status: int, body: bytes = b"{}") -> Answered:
        """Report the result of the call that a CLAIM_LIMIT_RESET asked for."""
        assert asked.action.claim is not None
        done = LimitResetReport(asked.action.claim.claim_id, asked.action.claim.step, status, body)
        return await self.report(decision, limit_reset=done, headers=self.wall_headers())

    def lane(self) -> Lane:
        row = self.replica.view.rows.get((Lane.KIND, "claude", "c1"))
        return row if isinstance(row, Lane) else Lane("claude", "c1")

    async def catch_up(self) -> None:
        """Read what the others committed."""
        await self.replica.follower._step()


def gateway(store: Store, settings: ReplicaSettings, moments: FakeTime | None, **options: Any) -> Gateway:
    """A replica that is not started yet, with a caller."""
    replica = make_replica(
        store,
        settings.name,
        time_source=moments,
        catalogue=catalogue(**options),
        settings=settings,
        seed=hash(settings.name),
    )
    return Gateway(replica, replica.wall, moments)
