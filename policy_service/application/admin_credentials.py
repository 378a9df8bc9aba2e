"""Revivals of expired connections: handed out one at a time in the fleet, performed and reported by gateways
(spec/terminal_states.md section 4)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from policy_service.application.admin import Acts
from policy_service.application.connection_acts import grant_retry, retry_result
from policy_service.application.errors import NotFoundError
from policy_service.application.ports import Clock, Scope, Unit, UnitResult
from policy_service.application.view import View
from policy_service.domain import terminal
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.facts import Cause, FactLog
from policy_service.domain.ids import DurationMs, Instant
from policy_service.domain.state import StateBook

SWEEP_MS: DurationMs = 60_000
"""Longest time after which a gateway is told to ask again."""
_SEPARATOR = "\0"


class Due(NamedTuple):
    """A connection whose revival is due at `at`."""

    at: Instant
    provider: str
    connection: str


@dataclass(frozen=True, slots=True)
class CredentialRetry:
    """Answer to the question what is due; an empty permit id: nothing."""

    next_due_ms: DurationMs
    permit_id: str = ""
    provider: str = ""
    connection: str = ""
    attempts: int = 0
    """Attempts made before."""
    test_token_first: bool = False
    """The stored access token is still good: test it before a rotating refresh token is spent."""


@dataclass(frozen=True, slots=True)
class CredentialResult:
    """State of the connection after a report."""

    state: str
    attempts_left: int | None = None
    """None: not limited."""


class CredentialAdmin:
    """Hands out revivals and takes their results."""

    def __init__(self, acts: Acts, view: View, clock: Clock) -> None:
        self._acts = acts
        self._view = view
        self._clock = clock

    async def next_retry(self, providers: Collection[str] = ()) -> CredentialRetry:
        """The revival that has been due for the longest time, under one permit in the fleet.

        Args:
            providers: providers whose credentials the gateway holds; empty means all.

        Raises:
            StoreLostError: the store is away.
        """
        now = self._clock.now()
        wanted = {self._view.policy.canonical(name) for name in providers}
        coming = sorted(self._coming(wanted))
        for due in coming:
            if due.at > now:
                break
            if (granted := await self._grant(due)) is not None:
                return granted
        later = (due.at - now for due in coming if due.at > now)
        return CredentialRetry(min((SWEEP_MS, *later)))

    def _coming(self, wanted: Collection[str]) -> Iterator[Due]:
        for row in self._view.rows.values():
            if isinstance(row, ConnectionState) and (not wanted or row.provider in wanted):
                at = terminal.next_retry_at(row)
                if at is not None:
                    yield Due(at, row.provider, row.connection)

    async def _grant(self, due: Due) -> CredentialRetry | None:
        permit_id = _permit_id(self._acts.new_id(), due)

        def run(book: StateBook, now: Instant, _known: object) -> UnitResult[CredentialRetry | None]:
            facts = FactLog(Cause(f"credential/{permit_id}/grant", now, self._acts.replica, reason="retry_unreported"))
            permit = grant_retry(book, due.provider, due.connection, permit_id, now, facts)
            if permit is None:
                return UnitResult(None, facts.facts)
            attempts = book.get(ConnectionState, due.provider, due.connection).retry_attempts
            task = CredentialRetry(0, permit.id, due.provider, due.connection, attempts, permit.test_token_first)
            return UnitResult(task, facts.facts)

        return (await self._acts.commit(Unit(_scope(due), run))).value

    async def report(self, permit_id: str, *, succeeded: bool, token_expires_at: Instant | None) -> CredentialResult:
        """Take the result of a revival; repeated, it gets the same answer.

        Raises:
            NotFoundError: no connection waits for the result of this permit.
            StoreLostError: the store is away.
        """
        due = _opened(permit_id)
        event_id = f"credential/{permit_id}"

        def run(book: StateBook, now: Instant, known: Mapping[str, bytes]) -> UnitResult[CredentialResult | None]:
            if event_id in known:
                return UnitResult(CredentialResult(**json.loads(known[event_id])))
            if book.get(ConnectionState, due.provider, due.connection).retry_permit != permit_id:
                return UnitResult(None)
            facts = FactLog(Cause(event_id, now, self._acts.replica, reason=_REASONS[succeeded]))
            row = retry_result(book, due.provider, due.connection, succeeded, now, facts)
            if succeeded and token_expires_at is not None:
                row = replace(row, token_expires_at=token_expires_at)
                book.put(row)
            result = _result(row)
            return UnitResult(result, facts.facts, {event_id: json.dumps(asdict(result)).encode()})

        result = (await self._acts.commit(Unit(_scope(due), run, (event_id,)))).value
        if result is None:
            raise _unknown()
        return result


_REASONS = {True: "retry_succeeded", False: "retry_failed"}


def _result(row: ConnectionState) -> CredentialResult:
    left = terminal.RETRY_LIMIT - row.retry_attempts if row.test_status == terminal.EXPIRED else None
    return CredentialResult(row.test_status, left)


def _scope(due: Due) -> Scope:
    return Scope(frozenset({due.provider}), frozenset({(due.provider, due.connection)}))


def _permit_id(fresh: str, due: Due) -> str:
    """Names its connection, so that any replica can take the result before its view has heard of the permit."""
    place = f"{due.provider}{_SEPARATOR}{due.connection}".encode()
    return f"{fresh}.{base64.urlsafe_b64encode(place).decode().rstrip('=')}"


def _opened(permit_id: str) -> Due:
    _, _, place = permit_id.partition(".")
    try:
        text = base64.urlsafe_b64decode(place + "=" * (-len(place) % 4)).decode()
    except (binascii.Error, ValueError):
        raise _unknown() from None
    provider, separator, connection = text.partition(_SEPARATOR)
    if not separator or not provider:
        raise _unknown()
    return Due(0, provider, connection)


def _unknown() -> NotFoundError:
    return NotFoundError("no connection waits for the result of this permit; ask for the next one")
