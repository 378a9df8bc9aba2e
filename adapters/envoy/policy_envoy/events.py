"""What can happen to a stage: messages of Envoy, results of calls, the end of the stream. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from policy_service.generated.policy.v1 import policy_pb2

if TYPE_CHECKING:
    from policy_envoy.flight import Decision, Flight


class RequestHeaders(NamedTuple):
    """The request of the client, or of one attempt."""

    headers: Mapping[str, str]
    has_body: bool
    now_ms: float
    """Monotonic clock of the door."""


class AttemptHeaders(NamedTuple):
    """The request of one attempt, at the connection that Envoy has chosen."""

    headers: Mapping[str, str]
    has_body: bool
    now_ms: float
    flight: Flight | None
    """The client request; None: the listener stage was passed over."""
    attempt: int
    """Attempt of Envoy, from 1."""
    connection: str
    base_path: str = ""
    """Path of the connection's base URL."""


class RequestBody(NamedTuple):
    """The whole request body."""

    body: bytes


class ResponseHeaders(NamedTuple):
    """Head of an answer."""

    status: int
    headers: Mapping[str, str]
    has_body: bool
    now_ms: float
    details: str = ""
    """Envoy's response code details; the listener stage only."""


class ResponseBody(NamedTuple):
    """The whole body of an answer, or a chunk of a streamed one."""

    body: bytes
    is_end: bool
    now_ms: float


class ResponseTrailers(NamedTuple):
    """End of an answer that has trailers."""

    now_ms: float


class Selected(NamedTuple):
    """Answer of SelectTarget."""

    answer: policy_pb2.SelectTargetResponse
    now_ms: float


class Decided(NamedTuple):
    """SelectTarget's dispatch, where it was answered at once: nothing disturbs it, nothing is to be explained."""

    decision: Decision
    now_ms: float


class Acquired(NamedTuple):
    """The attempt may go."""

    permit_ids: tuple[str, ...] = ()


class Refused(NamedTuple):
    """The attempt may not go: no slot, or no valid fence."""

    code: str
    http_status: int
    message: str
    retry_after_ms: int | None = None


class Judged(NamedTuple):
    """Answer of ReportOutcome."""

    answer: policy_pb2.ReportOutcomeResponse


class Waited(NamedTuple):
    """A pause is over."""


class CallFailed(NamedTuple):
    """A call ended with an error of the service."""

    code: str
    http_status: int
    message: str
    retry_after_ms: int | None = None


class Closed(NamedTuple):
    """Envoy ended the stream."""

    now_ms: float


Event: TypeAlias = (
    RequestHeaders
    | AttemptHeaders
    | RequestBody
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
    | Selected
    | Decided
    | Acquired
    | Refused
    | Judged
    | Waited
    | CallFailed
    | Closed
)
