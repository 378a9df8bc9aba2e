"""Ids of the calls that one client request makes: it may select again after a wait or a failed attempt, and each of
these calls may wait for a start slot first. A repeated call has the same id and finds its own permit.
"""

from __future__ import annotations

import re

_START = "@start"
SUFFIXES = rf"(#[0-9]+\.[0-9]+)?({_START})?"
"""What may follow the request's own id; read by Python and Postgres alike."""


def call_id(request_id: str, waits: int, tried: int) -> str:
    """Id of a call after so many waits and failed attempts of its client request."""
    return f"{request_id}#{waits}.{tried}" if waits or tried else request_id


def start_id(call: str) -> str:
    """Id under which a call waits for its start slot."""
    return f"{call}{_START}"


def is_call_of(call: str, request_id: str) -> bool:
    """True if a call belongs to this client request."""
    return re.fullmatch(re.escape(request_id) + SUFFIXES, call) is not None
