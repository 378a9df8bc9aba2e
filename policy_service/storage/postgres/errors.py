"""Database errors sorted by what they mean for a unit of work; no SQL text or value passes outward."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from sqlalchemy import exc

from policy_service.application.ports import StoreSlowError, StoreUnavailableError, UnitRefusedError

DEADLOCK = "40P01"
SERIALIZATION_FAILURE = "40001"

_RERUN = frozenset({DEADLOCK, SERIALIZATION_FAILURE})
_LOST = frozenset({"57P01", "57P02", "57P05", "25P03", "25P04"})
_REASONS = {
    "25006": "the server is read-only",
    "42P01": "a table is missing",
    "53300": "too many connections",
    "55P03": "a lock was not granted in time",
    "57014": "a statement ran too long",
    "57P01": "the server ended the connection",
    "57P02": "the server crashed",
    "57P03": "the server is starting or stopping",
    "28P01": "the password was refused",
    "28000": "the login was refused",
    "3D000": "the database does not exist",
    "42501": "the login lacks a permission",
}
_SLOW = frozenset({"55P03", "57014"})
_FAULTS_OF_THE_UNIT = ("21", "22", "23", "42")


class Remedy(Enum):
    """What a unit of work does about an error."""

    RERUN = auto()
    """Nothing was written: run it again."""
    RECONNECT = auto()
    """The connection is gone and the result of a COMMIT is unknown: run it again on another connection."""
    GIVE_UP = auto()


class AnswerRaceError(Exception):
    """Another unit stored an answer of this one under other guards in between; run again to see it."""


def sqlstate_of(error: BaseException) -> str:
    """Five-character code of a database error; empty for others."""
    orig = getattr(error, "orig", None) or error
    return str(getattr(orig, "sqlstate", None) or "")


def remedy_of(error: BaseException) -> Remedy:
    """What to do about an error of one attempt."""
    state = sqlstate_of(error)
    if isinstance(error, AnswerRaceError) or state in _RERUN:
        return Remedy.RERUN
    if state in _LOST or state.startswith("08") or _is_connection_gone(error):
        return Remedy.RECONNECT
    return Remedy.GIVE_UP


def _is_connection_gone(error: BaseException) -> bool:
    """The driver complains, not the server: a pooled connection was dead before or died during the call."""
    return isinstance(error, exc.DBAPIError) and (error.connection_invalidated or not sqlstate_of(error))


def public_error(error: BaseException) -> Exception | None:
    """The error of the port that stands for a database error; None for errors that are not the database's."""
    if isinstance(error, AnswerRaceError):
        return StoreUnavailableError("the unit kept meeting answers of others")
    if isinstance(error, (OSError, TimeoutError, asyncio.TimeoutError, exc.TimeoutError)):
        return StoreUnavailableError(f"the server does not answer ({type(error).__name__})")
    state = sqlstate_of(error)
    if not state and not isinstance(error, exc.SQLAlchemyError):
        return None
    return _of_sqlstate(state)


def _of_sqlstate(state: str) -> Exception:
    reason = _REASONS.get(state)
    if reason is None and state.startswith(_FAULTS_OF_THE_UNIT):
        return UnitRefusedError(f"the database refused the unit (SQLSTATE {state})")
    kind = StoreSlowError if state in _SLOW else StoreUnavailableError
    return kind(f"{reason or 'the connection failed'} (SQLSTATE {state or 'none'})")
