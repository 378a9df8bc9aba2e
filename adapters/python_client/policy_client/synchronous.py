"""The blocking client: performs the steps of a request and of a lease; every decision is made elsewhere.

Safe for threads; one client per process. Reports of successes are sent behind, without a thread of their own:
`settle` or `close` wait for them. Renewals and the look for a service that is away run in daemon threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from policy_client import connection, leasing, messages, steps
from policy_client.away import AwayPolicy, look_again_ms
from policy_client.background import Background, Pending, log
from policy_client.backlog import refused_for_now
from policy_client.connection import Connection, Method
from policy_client.core import PASSING, ClientBase, Core, Sources, method_of
from policy_client.errors import LeaseUnavailableError, PolicyClientError
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Behind, Budget, Hold, Result
from policy_client.wire import HEALTH_MS, GrpcRpc, Rpc

T = TypeVar("T")
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)

Call = Callable[[Attempt], Answer[T]]
"""Makes one upstream call, within `attempt.timeout_ms` where that is set."""

SETTLE_S = 5.0


class PolicyClient(ClientBase):
    """Client of the policy service, for code that blocks.

    Args:
        address: `host:port` or `unix:/path`; in place of `where`.
        where: address, TLS, bearer key, deadlines.
        away: what to do while the service is away.
        channel: a channel of one's own in place of the address.
        rpc: another way to the service, such as a fake.
        sources: time and ids, for tests.
    """

    def __init__(
        self,
        address: str = "",
        *,
        where: Connection | None = None,
        away: AwayPolicy | None = None,
        channel: grpc.Channel | None = None,
        rpc: Rpc | None = None,
        sources: Sources | None = None,
    ) -> None:
        place = where or Connection(address or connection.DEFAULT_ADDRESS)
        self._rpc = rpc or GrpcRpc(place, channel)
        super().__init__(Core(place, away or AwayPolicy(), sources or Sources(), self._look_for_service))
        self._pending = Pending()
        self._flushing = Lock()
        self._looking: Background | None = None

    # -- the whole loop --------------------------------------------------------------------------------
    def run(self, asked: messages.SelectTargetRequest, call: Call[T], budget: Budget | None = None) -> Result[T]:
        """Select, call, report, fall back, wait: until there is an answer for whoever asked.

        Args, result and errors are those of `AsyncPolicyClient.run`; `call` blocks.
        """
        turn = self._core.begin(asked, budget or Budget())
        try:
            while not isinstance(turn.step, steps.Return | steps.Raise):
                self._send_behind(turn.behind)
                turn = turn._replace(behind=())
                self._keep_alive(turn.journey.hold)
                event = self._perform(turn.step, call)
                turn = turn.journey.advance(event, self._core.sources.now())
        except BaseException:  # an interrupt comes anywhere: also before what is to be sent was sent
            left = turn.journey.advance(steps.Left(), self._core.sources.now())
            turn = left._replace(behind=(*turn.behind, *left.behind))
            raise
        finally:
            self._let_go(turn)
            self._send_behind(turn.behind)
        if isinstance(turn.step, steps.Raise):
            raise turn.step.error
        return turn.step.result

    def _perform(self, step: Any, call: Call[T]) -> steps.Event[T]:
        match step:
            case steps.Call(attempt):
                return _called(call, attempt)
            case steps.Select(request, line_ms):
                return self._select(request, line_ms)
            case steps.Report(request):
                return self._report(request)
            case steps.CheckFence(request):
                return self._check_fence(request)
        self._core.sources.sleep(step.ms / 1000)
        return steps.Slept()

    def _select(self, request: messages.SelectTargetRequest, line_ms: int) -> steps.Event[Any]:
        without = self._core.without_service(request)
        if without is not None:
            return without
        timeout_ms, silence_ms = self._core.timeout_ms(connection.SELECT, line_ms), self._core.silence_ms(request)
        try:
            response = self.call(connection.SELECT, request, timeout_ms, silence_ms)
        except PolicyClientError as error:
            return self._core.not_selected(request, error)
        return self._core.selected(request, response)

    def _report(self, request: messages.ReportOutcomeRequest) -> steps.Event[Any]:
        try:
            return steps.Reported(self.call(connection.REPORT, request))
        except PolicyClientError as error:
            return self._core.not_reported(request, error)

    def _check_fence(self, request: messages.CheckFenceRequest) -> steps.Event[Any]:
        try:
            return steps.FenceChecked(self.call(connection.CHECK_FENCE, request))
        except PolicyClientError as error:
            return steps.Failed(error)

    def complete(self, result: Result[Any], outcome: Outcome) -> None:
        """Tell the end of a stream that `run` gave back as open; once.

        Raises:
            ValueError: the result owes no report.
        """
        report = self._core.completion(result, outcome)
        self._release_hold(report.request.decision_token)
        self._send_behind((report,))

    # -- single calls ----------------------------------------------------------------------------------
    def call(self, method: Method[Q, A], request: Q, timeout_ms: int = 0, silence_ms: int = 0) -> A:
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
            answer = self._rpc.call(method, request, timeout_ms or self._core.timeout_ms(method), silence_ms)
        except PolicyClientError as error:
            self._core.heard(error)
            raise
        self._core.heard()
        if self._core.is_time_to_flush():
            Background(lambda _: self.flush())
        return answer

    def select(self, request: messages.SelectTargetRequest) -> messages.SelectTargetResponse:
        """SelectTarget: where may this request go now? May stand in line for `wait_budget_ms`."""
        return self.call(connection.SELECT, request, self._core.timeout_ms(connection.SELECT, request.wait_budget_ms))

    def report(self, request: messages.ReportOutcomeRequest) -> messages.ReportOutcomeResponse:
        """ReportOutcome: this is what came back."""
        return self.call(connection.REPORT, request)

    # -- leases ----------------------------------------------------------------------------------------
    @contextmanager
    def lease(self, wanted: leasing.Wanted) -> Iterator[Lease]:
        """A connection of one's own for the block; renewed while it runs, released at its end.

        Raises:
            LeaseUnavailableError: none now.
            ServiceError, ServiceAwayError: the call failed.
        """
        lease = Lease(self._acquire(wanted), self._core.sources.now)
        renewing = Background(lambda stopped: self._renew(lease, stopped))
        try:
            yield lease
        finally:
            renewing.cancel()
            if not lease.held.lost:
                self._send_behind((lease.held.release(is_cancelled=False),))

    def _acquire(self, wanted: leasing.Wanted) -> leasing.Held:
        asked_at = self._core.sources.now()
        answer = self.call(connection.ACQUIRE_LEASE, wanted.acquire(self._core.sources.new_id()))
        if answer.HasField("unavailable"):
            raise LeaseUnavailableError(answer.unavailable)
        return leasing.granted(wanted, answer.lease, asked_at)

    def _renew(self, lease: Lease, stopped: Event) -> None:
        while not lease.held.lost:
            due_at = min(lease.held.renew_at, lease.held.ends_at)
            if stopped.wait(max(0, due_at - self._core.sources.now()) / 1000):
                return
            lease.update(self._renewed(lease.held))

    def _renewed(self, held: leasing.Held) -> leasing.Held:
        asked_at = self._core.sources.now()
        if asked_at >= held.ends_at:
            return leasing.ended(held, asked_at)
        try:
            answer = self.call(connection.RENEW_LEASE, held.renewal())
        except PolicyClientError as error:
            return leasing.not_renewed(held, error, self._core.sources.now())
        return leasing.renewed(held, answer.lease, asked_at)

    # -- behind ----------------------------------------------------------------------------------------
    def _send_behind(self, behind: tuple[Behind, ...]) -> None:
        for each in behind:
            if self._core.presence.is_away:
                self._core.keep(each)
            else:
                self._send(each)

    def _send(self, behind: Behind) -> None:
        pending = self._pending

        def done(error: PolicyClientError | None) -> None:
            try:
                if error is not None:
                    self._core.not_sent(behind, error)
                self._core.heard(error)
            finally:
                pending.done()

        method, request = method_of(behind)
        pending.add()
        self._rpc.send(method, request, self._core.timeout_ms(method), done)

    def flush(self) -> None:
        """Send what was kept while the service was away; what fails again is kept."""
        with self._flushing:  # the next one finds what this one puts back
            self._give_back()
            while self.kept_reports and not self._flush_some():
                pass

    def _flush_some(self) -> bool:
        """Send the oldest; whether some are left for another time."""
        taken, batch = self._core.due()
        again = taken
        try:
            again = refused_for_now(taken, self.call(connection.REPORTS, batch))
        except PolicyClientError as error:
            log.info("not done: %s", error)
        finally:  # also where the flush itself is cancelled
            self._core.backlog.put_back(again)
        return bool(again)

    def _give_back(self) -> None:
        owed = self._core.owed()
        try:
            while owed:
                try:
                    self.call(*method_of(owed[0].request))
                except PASSING:
                    return
                except PolicyClientError as error:
                    log.info("not given back: %s", error)
                owed.popleft()
        finally:
            self._core.returns.put_back(owed)

    def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait for what was sent behind; False if that took too long."""
        return self._pending.wait(timeout_s)

    # -- keeping grants alive --------------------------------------------------------------------------
    def _keep_alive(self, hold: Hold | None) -> None:
        if hold is not None and hold.token not in self._holds:
            self._holds[hold.token] = Background(lambda stopped: self._keep_renewing(hold, stopped))

    def _keep_renewing(self, hold: Hold, stopped: Event) -> None:
        request = messages.RenewPermitRequest(decision_token=hold.token)
        for _ in range(steps.MOST_RENEWALS):
            if stopped.wait(hold.renew_ms / 1000):
                return
            abandoned = self._abandoned(hold.token)
            if abandoned:
                self._send_behind(abandoned)
                return
            with suppress(PolicyClientError):
                self.call(connection.RENEW_PERMIT, request)

    # -- presence --------------------------------------------------------------------------------------
    def _look_for_service(self) -> None:
        # Each loss has a look of its own: the one before may have seen the service, and be past its last look.
        if self._looking is not None:
            self._looking.cancel()
        self._looking = Background(self._look)

    def _look(self, stopped: Event) -> None:
        times = 0
        while self.is_away:
            if stopped.wait(look_again_ms(times) / 1000):
                return
            times += 1
            if self._rpc.is_serving(HEALTH_MS):
                self._core.presence.found()
        self.flush()

    # -- life ------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Wait for what was sent behind, try once to send what was kept, then close the connection."""
        self.settle()
        if not self.is_away:
            self.flush()
        threads = [*self._holds.values(), *((self._looking,) if self._looking else ())]
        for thread in threads:
            thread.cancel()
        self._core.closing()
        self._rpc.close()

    def after_fork(self) -> None:
        super().after_fork()
        self._pending = Pending()
        self._flushing = Lock()
        self._looking = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease(leasing.InHand):
    """A lease in hand; put `context` into the requests that use it."""

    def __init__(self, held: leasing.Held, now: Callable[[], int]) -> None:
        super().__init__(held, now)
        self._lost = Event()

    def wait_lost(self, timeout_s: float | None = None) -> str:
        """Wait until the lease is lost; its code, empty if the time was over first."""
        self._lost.wait(timeout_s)
        return self.held.lost

    def update(self, held: leasing.Held) -> None:
        super().update(held)
        if held.lost:
            self._lost.set()


def _called(call: Call[T], attempt: Attempt) -> steps.Event[T]:
    try:
        return steps.Answered(call(attempt))
    except Exception as error:
        return steps.Raised(error)
