"""State of one attempt and the small moves that several of its phases share. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from policy_envoy import reports
from policy_envoy.actions import Action, Mode, Release, Success
from policy_envoy.events import AttemptHeaders, ResponseHeaders
from policy_envoy.explanation import attempt_line
from policy_envoy.flight import NO_FLIGHT, Flight, Step
from policy_envoy.names import DECISION_HEADER
from policy_envoy.options import DoorOptions
from policy_envoy.phases import Next
from policy_envoy.streams import StreamWatch
from policy_service.domain.stream_events import StreamFormat
from policy_service.domain.watchdog import WatchdogSettings
from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2


class Phase(StrEnum):
    """Where an attempt stands."""

    NEW = "new"
    UNKNOWN = "unknown"
    """The listener stage was passed over: this attempt is nobody's."""
    ACQUIRING = "acquiring"
    SENT = "sent"
    BODY = "body"
    """An error status; its body is awaited."""
    JUDGING = "judging"
    """A failure was reported; its verdict is awaited."""
    PAUSING = "pausing"
    RESELECTING = "reselecting"
    OPEN = "open"
    HELD = "held"
    FLOWING = "flowing"
    ENDING = "ending"
    """The client is told of an error in the stream; with the next chunk it is cut off."""
    DONE = "done"


_UNSENT = frozenset((Phase.NEW, Phase.ACQUIRING))

NO_STEP = Step(types_pb2.Target(), b"", 0)
NO_REQUEST = AttemptHeaders({}, False, 0, None, 1, "")
NO_HEAD = ResponseHeaders(0, {}, False, 0)
NO_REPORT = policy_pb2.ReportOutcomeRequest()
NO_VERDICT = policy_pb2.ReportOutcomeResponse()
NO_WATCH = StreamWatch(StreamFormat.UNKNOWN, WatchdogSettings())


class Attempt(NamedTuple):
    """State of the stage; what is not known yet is a value of that name."""

    options: DoorOptions
    phase: Phase = Phase.NEW
    flight: Flight = NO_FLIGHT
    step: Step = NO_STEP
    request: AttemptHeaders = NO_REQUEST
    modes: tuple[Mode, ...] = ()
    permit_ids: tuple[str, ...] = ()
    """Taken for this attempt alone."""
    head: ResponseHeaders = NO_HEAD
    answers: str = "response_headers"
    """Message of Envoy that waits for its reply."""
    report: policy_pb2.ReportOutcomeRequest = NO_REPORT
    verdict: policy_pb2.ReportOutcomeResponse = NO_VERDICT
    watch: StreamWatch = NO_WATCH
    held: bytes = b""
    is_held_end: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing that Envoy may still say matters; a held answer has to be let through to its last chunk."""
        return self.phase is Phase.DONE and Mode.HELD not in self.modes

    @property
    def started_ms(self) -> float:
        """When the attempt was dispatched."""
        return self.request.now_ms


def done(state: Attempt, *actions: Action) -> Next:
    """The attempt is over."""
    if state.phase not in _UNSENT:
        state.flight.under_way -= 1
    return Next(Attempt(state.options, Phase.DONE, modes=state.modes), actions)


def succeeded(state: Attempt, head: ResponseHeaders) -> Success:
    """An answer that is no error; how it ended is not known yet."""
    return reports.success(state.flight, state.step, head.status, head.headers, state.started_ms, head.now_ms)


def given_back(state: Attempt) -> tuple[Action, ...]:
    """Permits of this attempt alone; those of the decision end with its final report."""
    if not state.permit_ids:
        return ()
    state.flight.attempt_permits = ()
    return (Release(permit_pb2.ReleasePermitRequest(permit_ids=state.permit_ids)),)


def explained(state: Attempt) -> tuple[tuple[str, str], ...]:
    """`x-policy-decision`, where it was asked for."""
    flight, step, request = state.flight, state.step, state.request
    if not flight.explanation:
        return ()
    return ((DECISION_HEADER, attempt_line(flight.explanation, step.target, request.attempt)),)
