"""The client for asyncio: performs the steps of a request and of a lease; every decision is made elsewhere.

One client per process and event loop; it is safe for any number of tasks. Reports of successes are sent behind:
`settle` or `close` wait for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from policy_client import connection, leasing, messages, steps
from policy_client.away import AwayPolicy, look_again_ms
from policy_client.backlog import refused_for_now
from policy_client.connection import Connection, Method
from policy_client.core import ClientBase, Core, Sources, method_of
from policy_client.errors import LeaseUnavailableError, PolicyClientError
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Behind, BehindReport, Budget, Hold, Result
from policy_client.wire import HEALTH_MS
from policy_client.wire_async import AsyncRpc, GrpcAsyncRpc

log = logging.getLogger("policy_client")

T = TypeVar("T")
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

AsyncCall = Callable[[Attempt], Awaitable[Answer[T]]]
"""Makes one upstream call. An exception of the network stack is an outcome; any other ends the request."""
Work = Callable[..., Coroutine[Any, Any, None]]


class AsyncPolicyClient(ClientBase):
    """Client of the policy service.

    Args:
        address: `host:port` or `unix:/path`; in place of `where`.
        where: address, TLS, bearer key, deadlines.
        away: what to do while the service is away.
        rpc: another way to the service, such as a fake.
        sources: time and ids, for tests.
    """

    def __init__(
        self,
        address: str = "",
        *,
        where: Connection | None = None,
        away: AwayPolicy | None = None,
        rpc: AsyncRpc | None = None,
        sources: Sources | None = None,
    ) -> None:
        place = where or Connection(address or connection.DEFAULT_ADDRESS)
        self._rpc = rpc or GrpcAsyncRpc(place)
        super().__init__(Core(place, away or AwayPolicy(), sources or Sources(), self._look_for_service))
        self._behind: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    # -- the whole loop --------------------------------------------------------------------------------
    async def run(
        self, asked: messages.SelectTargetRequest, call: AsyncCall[T], budget: Budget | None = None
    ) -> Result[T]:
        """Select, call, report, fall back, wait: until there is an answer for whoever asked.

        Args:
            asked: what to select from; see `messages.pool` and `messages.route`.
            call: makes one upstream call.
            budget: bounds of the request.

        Returns:
            The answer: a success, or the failure that no other target could better.

        Raises:
            NoTargetError: the policy has no target, or none within the budget.
            RefusedWhileAwayError: the service is away and the fail mode says no.
            LeaseLostError, FenceError: the lease of the request is over; nothing was dispatched.
            ServiceError: the service refuses the call as such.
            Exception: what `call` raised, where that was the last word.
        """
        turn = self._core.begin(asked, budget or Budget())
        try:
            while not isinstance(turn.step, steps.Return | steps.Raise):
                self._send_behind(turn.behind)
                self._keep_alive(turn.journey.hold)
                event = await self._perform(turn.step, call)
                turn = turn.journey.advance(event, self._core.sources.now())
        except BaseException:
            turn = turn.journey.advance(steps.Left(), self._core.sources.now())
            raise
        finally:
            self._let_go(turn)
            self._send_behind(turn.behind)
        if isinstance(turn.step, steps.Raise):
            raise turn.step.error
        return turn.step.result

    async def _perform(self, step: Any, call: AsyncCall[T]) -> steps.Event[T]:
        match step:
            case steps.Call(attempt):
                return await _called(call, attempt)
            case steps.Select(request, line_ms):
                return await self._select(request, line_ms)
            case steps.Report(request):
                return await self._report(request)
            case steps.CheckFence(request):
                return await self._check_fence(request)
        await asyncio.sleep(step.ms / 1000)
        return steps.Slept()

    async def _select(self, request: messages.SelectTargetRequest, line_ms: int) -> steps.Event[Any]:
        without = self._core.without_service(request)
        if without is not None:
            return without
        timeout_ms, silence_ms = self._core.timeout_ms(connection.SELECT, line_ms), self._core.silence_ms(request)
        try:
            response = await self.call(connection.SELECT, request, timeout_ms, silence_ms)
        except PolicyClientError as error:
            return self._core.not_selected(request, error)
        return self._core.selected(request, response)

    async def _report(self, request: messages.ReportOutcomeRequest) -> steps.Event[Any]:
        try:
            return steps.Reported(await self.call(connection.REPORT, request))
        except PolicyClientError as error:
            return self._core.not_reported(request, error)

    async def _check_fence(self, request: messages.CheckFenceRequest) -> steps.Event[Any]:
        try:
            return steps.FenceChecked(await self.call(connection.CHECK_FENCE, request))
        except PolicyClientError as error:
            return steps.Failed(error)

    async def complete(self, result: Result[Any], outcome: Outcome) -> None:
        """Tell the end of a stream that `run` gave back as open; once.

        Raises:
            ValueError: the result owes no report.
        """
        report = self._core.completion(result, outcome)
        self._release_hold(report.request.decision_token)
        self._send_behind((report,))

    # -- single calls ----------------------------------------------------------------------------------
    async def call(self, method: Method[Q, A], request: Q, timeout_ms: int = 0, silence_ms: int = 0) -> A:
        """One call of the contract.

        Args:
            method: one of `policy_client.connection`.
            request: its message.
            timeout_ms: deadline; 0: that of the method.
            silence_ms: after so long without an answer, ask whether the service is there; 0: wait to the deadline.

        Raises:
            ServiceError: the service answered with an error.
            ServiceAwayError: it did not answer.
        """
        try:
            answer = await self._rpc.call(method, request, timeout_ms or self._core.timeout_ms(method), silence_ms)
        except PolicyClientError as error:
            self._core.heard(error)
            raise
        self._core.heard()
        if self._core.is_time_to_flush():
            self._spawn(self.flush)
        return answer

    async def select(self, request: messages.SelectTargetRequest) -> messages.SelectTargetResponse:
        """SelectTarget: where may this request go now? May stand in line for `wait_budget_ms`."""
        return await self.call(
            connection.SELECT, request, self._core.timeout_ms(connection.SELECT, request.wait_budget_ms)
        )

    async def report(self, request: messages.ReportOutcomeRequest) -> messages.ReportOutcomeResponse:
        """ReportOutcome: this is what came back."""
        return await self.call(connection.REPORT, request)

    # -- leases ----------------------------------------------------------------------------------------
    @asynccontextmanager
    async def lease(self, wanted: leasing.Wanted) -> AsyncIterator[AsyncLease]:
        """A connection of one's own for the block; renewed while it runs, released at its end.

        Raises:
            LeaseUnavailableError: none now.
            ServiceError, ServiceAwayError: the call failed.
        """
        lease = AsyncLease(await self._acquire(wanted), self._core.sources.now)
        renewing = asyncio.create_task(_logged(self._renew, lease))
        is_cancelled = False
        try:
            yield lease
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            renewing.cancel()
            self._spawn(self._give_back, lease.held, is_cancelled)

    async def _acquire(self, wanted: leasing.Wanted) -> leasing.Held:
        asked_at = self._core.sources.now()
        answer = await self.call(connection.ACQUIRE_LEASE, wanted.acquire(self._core.sources.new_id()))
        if answer.HasField("unavailable"):
            raise LeaseUnavailableError(answer.unavailable)
        return leasing.granted(wanted, answer.lease, asked_at)

    async def _renew(self, lease: AsyncLease) -> None:
        while not lease.held.lost:
            now = self._core.sources.now()
            due_at = min(lease.held.renew_at, lease.held.ends_at)
            await asyncio.sleep(max(0, due_at - now) / 1000)
            lease.update(await self._renewed(lease.held))

    async def _renewed(self, held: leasing.Held) -> leasing.Held:
        asked_at = self._core.sources.now()
        if asked_at >= held.ends_at:
            return leasing.ended(held, asked_at)
        try:
            answer = await self.call(connection.RENEW_LEASE, held.renewal())
        except PolicyClientError as error:
            return leasing.not_renewed(held, error, self._core.sources.now())
        return leasing.renewed(held, answer.lease, asked_at)

    async def _give_back(self, held: leasing.Held, is_cancelled: bool) -> None:
        if not held.lost:
            await self.call(connection.RELEASE_LEASE, held.release(is_cancelled=is_cancelled))

    # -- behind ----------------------------------------------------------------------------------------
    def _send_behind(self, behind: tuple[Behind, ...]) -> None:
        for each in behind:
            self._spawn(self._send, each)

    def _spawn(self, work: Work, *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work, *arguments))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _send(self, behind: Behind) -> None:
        if not isinstance(behind, BehindReport):
            method, request = method_of(behind)
            await self.call(method, request)
        elif self._core.presence.is_away:
            self._core.backlog.keep(behind.request, behind.began_at)
        else:
            await self._send_report(behind)

    async def _send_report(self, behind: BehindReport) -> None:
        try:
            await self.call(connection.REPORT, behind.request)
        except PolicyClientError as error:
            self._core.not_reported(behind.request, error, behind.began_at)

    async def flush(self) -> None:
        """Send the reports that were kept while the service was away; those that fail again are kept."""
        while self.kept_reports:
            taken, batch = self._core.due()
            again = taken
            try:
                again = refused_for_now(taken, await self.call(connection.REPORTS, batch))
            except PolicyClientError as error:
                log.info("not done: %s", error)
            finally:  # also where the flush itself is cancelled
                self._core.backlog.put_back(again)
            if again:
                return

    async def settle(self) -> None:
        """Wait for what was sent behind."""
        while self._behind:
            await asyncio.gather(*self._behind, return_exceptions=True)

    # -- keeping grants alive --------------------------------------------------------------------------
    def _keep_alive(self, hold: Hold | None) -> None:
        if hold is not None and hold.token not in self._holds:
            self._holds[hold.token] = asyncio.create_task(_logged(self._keep_renewing, hold))

    async def _keep_renewing(self, hold: Hold) -> None:
        request = messages.RenewPermitRequest(decision_token=hold.token)
        for _ in range(steps.MOST_RENEWALS):
            await asyncio.sleep(hold.renew_ms / 1000)
            with suppress(PolicyClientError):
                await self.call(connection.RENEW_PERMIT, request)

    # -- presence --------------------------------------------------------------------------------------
    def _look_for_service(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(_logged(self._look))

    async def _look(self) -> None:
        times = 0
        while self.is_away:
            await asyncio.sleep(look_again_ms(times) / 1000)
            times += 1
            if await self._rpc.is_serving(HEALTH_MS):
                self._core.presence.found()
        await self.flush()

    # -- life ------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Wait for what was sent behind, then close the connection."""
        await self.settle()
        tasks = [*self._holds.values(), *((self._looking,) if self._looking else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._rpc.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncLease(leasing.InHand):
    """A lease in hand; put `context` into the requests that use it."""

    def __init__(self, held: leasing.Held, now: Callable[[], int]) -> None:
        super().__init__(held, now)
        self._lost = asyncio.Event()

    async def wait_lost(self) -> str:
        """Wait until the lease is lost; the code."""
        await self._lost.wait()
        return self.held.lost

    def update(self, held: leasing.Held) -> None:
        super().update(held)
        if held.lost:
            self._lost.set()


async def _called(call: AsyncCall[T], attempt: Attempt) -> steps.Event[T]:
    try:
        if attempt.timeout_ms is None:
            return steps.Answered(await call(attempt))
        async with asyncio.timeout(attempt.timeout_ms / 1000):
            return steps.Answered(await call(attempt))
    except Exception as error:
        return steps.Raised(error)


async def _logged(work: Work, *arguments: Any) -> None:
    # Made here, not by the caller: a task that is cancelled before its start would leave a coroutine behind.
    try:
        await work(*arguments)
    except PolicyClientError as error:
        log.info("not done: %s", error)
    except Exception:
        log.exception("a task of the policy client failed")
