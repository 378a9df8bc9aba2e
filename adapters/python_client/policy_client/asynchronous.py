"""The client for asyncio: performs the steps of a request and of a lease; every decision is made elsewhere.

Safe for any number of tasks of one event loop; it may be used in another loop once the one before is over, and keeps
what that left unsent. Reports of successes are sent behind: `settle` or `close` wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from policy_client import connection, leasing, messages, steps
from policy_client.away import AwayPolicy, look_again_ms
from policy_client.backlog import refused_for_now
from policy_client.connection import Connection, Method
from policy_client.core import PASSING, ClientBase, Core, Sources, method_of
from policy_client.errors import LeaseUnavailableError, PolicyClientError
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Behind, Budget, Hold, Result
from policy_client.tasks import Work, log, logged
from policy_client.wire import HEALTH_MS
from policy_client.wire_async import AsyncRpc, GrpcAsyncRpc

T = TypeVar("T")
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

AsyncCall = Callable[[Attempt], Awaitable[Answer[T]]]
"""Makes one upstream call. An exception of the network stack is an outcome; any other ends the request."""


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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._behind: dict[asyncio.Task[None], Behind | None] = {}
        self._looking: asyncio.Task[None] | None = None

    def _enter(self) -> None:
        """Tasks of a loop that is over end no more: what they were to send is kept, and the service looked for anew."""
        loop = _running_loop()
        if loop is self._loop:
            return
        if self._loop is not None and self._loop.is_running():
            raise RuntimeError("this client is in use in another event loop: make one for each loop")
        left, self._behind, self._holds, self._looking = list(self._behind.values()), {}, {}, None
        for behind in left:
            if behind is not None:
                self._core.keep(behind)
        self._core.presence.found()
        self._loop = loop

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
        self._enter()
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
        self._enter()
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
        self._enter()
        try:
            answer = await self._rpc.call(method, request, timeout_ms or self._core.timeout_ms(method), silence_ms)
        except PolicyClientError as error:
            self._core.heard(error)
            raise
        self._core.heard()
        if self._core.is_time_to_flush():
            self._spawn(None, self.flush)
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
        renewing = asyncio.create_task(logged(self._renew, lease))
        is_cancelled = False
        try:
            yield lease
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            renewing.cancel()
            if not lease.held.lost:
                self._send_behind((lease.held.release(is_cancelled=is_cancelled),))

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

    # -- behind ----------------------------------------------------------------------------------------
    def _send_behind(self, behind: tuple[Behind, ...]) -> None:
        for each in behind:
            if self._core.presence.is_away:
                self._core.keep(each)
            else:
                self._spawn(each, self._send, each)

    def _spawn(self, behind: Behind | None, work: Work, *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(logged(work, *arguments))
        self._behind[task] = behind
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[None]) -> None:
        behind = self._behind.pop(task, None)
        if behind is not None and task.cancelled():
            self._core.keep(behind)

    async def _send(self, behind: Behind) -> None:
        try:
            await self.call(*method_of(behind))
        except PolicyClientError as error:
            self._core.not_sent(behind, error)

    async def flush(self) -> None:
        """Send what was kept while the service was away; what fails again is kept."""
        await self._give_back()
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

    async def _give_back(self) -> None:
        owed = self._core.owed()
        try:
            while owed:
                try:
                    await self.call(*method_of(owed[0].request))
                except PASSING:
                    return
                except PolicyClientError as error:
                    log.info("not given back: %s", error)
                owed.popleft()
        finally:  # also where it is cancelled
            self._core.returns.put_back(owed)

    async def settle(self) -> None:
        """Wait for what was sent behind."""
        self._enter()
        while self._behind:
            await asyncio.gather(*self._behind, return_exceptions=True)

    # -- keeping grants alive --------------------------------------------------------------------------
    def _keep_alive(self, hold: Hold | None) -> None:
        if hold is not None and hold.token not in self._holds:
            self._holds[hold.token] = asyncio.create_task(logged(self._keep_renewing, hold))

    async def _keep_renewing(self, hold: Hold) -> None:
        request = messages.RenewPermitRequest(decision_token=hold.token)
        for _ in range(steps.MOST_RENEWALS):
            await asyncio.sleep(hold.renew_ms / 1000)
            abandoned = self._abandoned(hold.token)
            if abandoned:
                self._send_behind(abandoned)
                return
            with suppress(PolicyClientError):
                await self.call(connection.RENEW_PERMIT, request)

    # -- presence --------------------------------------------------------------------------------------
    def _look_for_service(self) -> None:
        # Each loss has a look of its own: the one before may have seen the service, and be past its last look.
        if self._looking is not None and self._looking is not asyncio.current_task():
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().create_task(logged(self._look))

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
        """Wait for what was sent behind, try once to send what was kept, then close the connection."""
        await self.settle()
        if not self.is_away:
            await self.flush()
        tasks = [*self._holds.values(), *((self._looking,) if self._looking else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._core.closing()
        await self._rpc.close()

    def after_fork(self) -> None:
        super().after_fork()
        self._loop, self._behind, self._looking = None, {}, None

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


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        text = "AsyncPolicyClient needs asyncio, and no event loop of it runs here"
        raise RuntimeError(f"{text}; under trio use PolicyClient in a thread") from None
