"""One client request under way: the order of its attempts, shared by the stages of one process.

`Flight` is what the listener stage knows and the attempts need. An attempt that meets another process finds the same
in Envoy's metadata (`carried`, `from_carried`).
"""

from __future__ import annotations

import base64
from binascii import b2a_base64
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from policy_envoy.course import Course, course_of
from policy_service.generated.policy.v1 import lease_pb2, policy_pb2, types_pb2

RENEWALS = 4
"""A permit is renewed at a third of its life at the latest (contract, Permit.expires_at_unix_ms), whatever the tick."""


Order = tuple[tuple[str, ...], tuple[str, ...]]


class Step(NamedTuple):
    """Where one attempt goes, and under which decision it is reported."""

    target: types_pb2.Target
    token: bytes
    number: int
    """Attempt number within its decision."""
    set_headers: tuple[tuple[str, str], ...] = ()
    needs_grant: bool = False
    """Ask for a permit before dispatch."""


class Decision(NamedTuple):
    """A dispatch, as far as a request goes by it."""

    id: str
    token: bytes
    decided_at_unix_ms: int
    course: Course
    permit_ids: tuple[str, ...] = ()
    renewal_ms: float = 0
    """Time after which the permits are renewed; 0: it has none."""


NO_DECISION = Decision("", b"", 0, Course((), (), (), frozenset(), ""))


@dataclass(slots=True, eq=False)
class Flight:
    """One client request."""

    id: str
    """Id of its first decision."""
    steps: list[Step]
    """One per attempt of Envoy, in order."""
    answered_ms: float
    """When the first decision came, monotonic clock of the door."""
    path: str = ""
    """As it goes upstream, without base path."""
    is_stream: bool = False
    """The client wants a streamed answer."""
    own_headers: tuple[tuple[str, str], ...] = ()
    """The client's own values of headers that a target of this request is given."""
    model: str = ""
    """Model of the request body, where it was read."""
    lease: lease_pb2.LeaseContext | None = None
    caller: tuple[str, str] = ("", "")
    """Id, and hash of the key."""
    explanation: str = ""
    """Text of `x-policy-decision`; empty: not asked for."""
    token: bytes = b""
    """Of the newest decision."""
    permit_ids: tuple[str, ...] = ()
    attempt_permits: tuple[str, ...] = ()
    """Taken for the attempt under way alone."""
    sets_headers: bool = False
    """Some target of this request is given headers of its own."""
    renews_at_ms: float = 0
    """When the permits have to be renewed."""
    renewal_ms: float = 0
    attempts: tuple[types_pb2.EarlierAttempt, ...] = ()
    """Attempts that failed."""
    begun: int = 0
    """Attempts of Envoy that are known to have begun."""
    under_way: int = 0
    """Attempts that were sent and are not over: the last report of the decision is theirs."""
    unanswered: tuple[tuple[Step, float], ...] = ()
    """Attempts that ended without an answer, with their start; failed, or given up with their client."""
    is_client_gone: bool = False
    is_over: bool = False
    """The listener stage has seen the last answer."""
    request: policy_pb2.SelectTargetRequest | None = None
    """As it was first asked, for a new selection; None: in another process."""
    decision: Decision = NO_DECISION
    """The first one."""
    _order: Order | None = None
    """None: the steps have changed since it was read."""

    @property
    def is_carried(self) -> bool:
        """Another process has begun it."""
        return self.request is None

    @property
    def held(self) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
        """What is renewed: token of the decision, its permits, those of the attempt."""
        return self.token, self.permit_ids, self.attempt_permits

    @property
    def stripped(self) -> frozenset[str]:
        """Request headers that no upstream gets."""
        return self.decision.course.stripped

    @property
    def holds_grant(self) -> bool:
        """A permit is held until the last report."""
        return bool(self.permit_ids)

    def adopt(self, decision: Decision, at: int = 0) -> None:
        """Take over a decision: its targets are the attempts from number `at` on."""
        course, token = decision.course, decision.token
        self.token, self.permit_ids, self.renewal_ms = token, decision.permit_ids, decision.renewal_ms
        self.steps[at:] = [Step(target, token, number, head, needs) for target, number, head, needs in course.stops]
        self.sets_headers = self.sets_headers or bool(course.stops[0].set_headers)
        self._order = None if at else (course.connections, course.addresses)

    def step_of(self, attempt: int, connection: str) -> Step | None:
        """The step of an attempt of Envoy (from 1) that goes to a connection; None: not decided by this request.

        The step of that number, else the next one to this connection: a host that Envoy does not know was passed over.
        """
        for step in self.steps[attempt - 1 :]:
            if step.target.connection == connection:
                return step
        return None

    def next_after(self, step: Step) -> Step | None:
        """The step after one."""
        index = self.steps.index(step) + 1
        return self.steps[index] if index < len(self.steps) else None

    def put_next(self, step: Step, target: types_pb2.Target, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Let the attempt after `step` go to `target`, and those of the plan after it follow."""
        index = self.steps.index(step) + 1
        later = [each for each in self.steps[index:] if not same_target(each.target, target)]
        following = Step(target, step.token, 0, headers, not same_target(step.target, target))
        self.sets_headers = self.sets_headers or bool(headers)
        self.steps[index:] = [
            each._replace(number=step.number + ahead) for ahead, each in enumerate((following, *later), 1)
        ]
        self._order = None

    @property
    def order(self) -> Order:
        """Connections in order, each the name of its cluster; endpoints in order, for the endpoint picker protocol."""
        if self._order is None:
            targets = [step.target for step in self.steps]
            connections = tuple(target.connection for target in targets)
            self._order = (connections, tuple(target.address for target in targets if target.address))
        return self._order

    def carried(self) -> str:
        """What another process needs to go on with this request, as one text whose first line is its id."""
        decision_id, token, decided_at_unix_ms, course, *_ = self.decision
        head = policy_pb2.SelectTargetResponse(
            decision_id=decision_id, decision_token=token, decided_at_unix_ms=decided_at_unix_ms
        )
        own = b2a_base64(head.SerializeToString(), newline=False).decode()  # joined bytes are a merged message
        return f"{decision_id}\n{self.begun}\n{self.path}\n{self.explanation}\n{course.carried}{own}"


NO_FLIGHT = Flight("", [], 0)
"""Stands where no request is known yet."""


def same_target(one: types_pb2.Target, other: types_pb2.Target) -> bool:
    """The same place, whatever its key and address."""
    return (one.provider, one.connection, one.model) == (other.provider, other.connection, other.model)


def decision_of(answer: policy_pb2.SelectTargetResponse) -> Decision:
    """The decision that a dispatch is."""
    course = course_of(answer.dispatch)
    return Decision(answer.decision_id, answer.decision_token, answer.decided_at_unix_ms, course, *_permits(answer))


def from_decision(decision: Decision, now_ms: float) -> Flight:
    """The flight of a request that was decided now."""
    flight = Flight(decision.id, [], now_ms, decision=decision)
    flight.adopt(decision)
    return flight


def from_answer(answer: policy_pb2.SelectTargetResponse, now_ms: float) -> Flight:
    """The flight of a dispatch."""
    return from_decision(decision_of(answer), now_ms)


def _permits(answer: policy_pb2.SelectTargetResponse) -> tuple[tuple[str, ...], float]:
    """Ids of the permits of a decision, and the time after which they are renewed; 0: it has none."""
    permits = answer.dispatch.permits
    if not permits:
        return (), 0
    shortest = min(permit.expires_at_unix_ms - answer.decided_at_unix_ms for permit in permits)
    return tuple(permit.permit_id for permit in permits), max(500, shortest / RENEWALS)


def from_carried(text: str, now_ms: float) -> Flight | None:
    """The flight that another process has begun; None: the text is none of `Flight.carried`."""
    try:
        _, begun, path, explanation, answer = text.split("\n")
        flight = from_answer(
            policy_pb2.SelectTargetResponse.FromString(base64.b64decode(answer, validate=True)), now_ms
        )
        flight.begun = int(begun)
    except (ValueError, DecodeError):
        return None
    flight.path, flight.explanation = path, explanation
    return flight
