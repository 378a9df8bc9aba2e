"""What a Dispatch says whatever its decision: where the attempts go, in which order, with which headers. Pure.

The same few dispatches come again and again; each is read once.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import NamedTuple

from policy_service.generated.policy.v1 import policy_pb2, types_pb2

Headers = tuple[tuple[str, str], ...]
_KEPT = 2_048
"""Courses that are remembered; then it starts anew, which costs less than keeping an order of use."""


class Stop(NamedTuple):
    """One attempt of a decision."""

    target: types_pb2.Target
    number: int
    """Attempt number within the decision."""
    set_headers: Headers = ()
    needs_grant: bool = False
    """Ask for a permit before dispatch: every stop but the first, whose grants came with the decision."""


class Course(NamedTuple):
    """Attempts in order, and what is derived from them."""

    stops: tuple[Stop, ...]
    connections: tuple[str, ...]
    addresses: tuple[str, ...]
    stripped: frozenset[str]
    """Request headers that no upstream gets."""
    carried: str
    """What another process needs of it: a SelectTargetResponse in base64, without padding, so that more may follow."""


def course_of(dispatch: policy_pb2.Dispatch) -> Course:
    """The course of a dispatch."""
    if dispatch.permits:  # their ids never come again
        return _read(dispatch)
    data = dispatch.SerializeToString()
    return _known.get(data) or _learn(data, dispatch)


_known: dict[bytes, Course] = {}


def _learn(data: bytes, dispatch: policy_pb2.Dispatch) -> Course:
    if len(_known) >= _KEPT:
        _known.clear()
    return _known.setdefault(data, _read(policy_pb2.Dispatch.FromString(data)))


def _read(dispatch: policy_pb2.Dispatch) -> Course:
    head = tuple((header.name.lower(), header.value) for header in dispatch.set_headers)
    later = (Stop(target, number, needs_grant=True) for number, target in enumerate(dispatch.fallbacks, 1))
    stops = (Stop(dispatch.target, 0, head), *later)
    return Course(
        stops,
        tuple(stop.target.connection for stop in stops),
        tuple(stop.target.address for stop in stops if stop.target.address),
        frozenset(dispatch.strip_headers),
        _carried(dispatch),
    )


def _carried(dispatch: policy_pb2.Dispatch) -> str:
    kept = policy_pb2.Dispatch(
        target=dispatch.target,
        fallbacks=dispatch.fallbacks,
        permits=dispatch.permits,
        set_headers=dispatch.set_headers,
    )
    data = policy_pb2.SelectTargetResponse(dispatch=kept).SerializeToString()
    while len(data) % 3:
        data += _NOT_DEGRADED
    return b2a_base64(data, newline=False).decode()


_NOT_DEGRADED = bytes((policy_pb2.SelectTargetResponse.DEGRADED_FIELD_NUMBER << 3, 0))
"""A field that says what is so without it: fills a message up to a whole number of base64 digits."""
