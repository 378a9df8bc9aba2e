"""Every committed version of every breaker row, kept by the database itself, and what must be true of them.

A trigger notes each write. It fires while the guard row is locked, so the order of the notes is the order of the
commits; their instants are those of the commits by the database's own record (`RECORDING`). The judgement uses
nothing of the service's code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

HISTORY = """
CREATE TABLE breaker_history (
  seq bigint GENERATED ALWAYS AS IDENTITY, provider text NOT NULL, state text NOT NULL,
  round bigint NOT NULL, written_at bigint NOT NULL, evidence_at bigint, permits jsonb NOT NULL);
CREATE FUNCTION note_breaker() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO breaker_history (provider, state, round, written_at, evidence_at, permits)
  SELECT row.provider, row.state, row.half_open_round,
    CASE WHEN TG_OP = 'DELETE' THEN floor(extract(epoch FROM clock_timestamp()) * 1000) ELSE row.written_at END,
    row.last_event_at, coalesce(row.permits, '[]')
  FROM (SELECT (CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END).*) AS row;
  RETURN NULL; END $$;
CREATE TRIGGER note_breaker AFTER INSERT OR UPDATE OR DELETE ON breaker FOR EACH ROW EXECUTE FUNCTION note_breaker();
"""

RECORDING = {"track_commit_timestamp": "on"}
"""Settings of a server that keeps the instants of its commits."""
READ = """SELECT *, floor(extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1000)::bigint AS at
  FROM breaker_history ORDER BY seq"""

BLOCKING = frozenset({"OPEN", "HALF_OPEN"})


@dataclass(frozen=True, slots=True)
class Permit:
    """One probe permit as a row showed it."""

    id: str
    decision_id: str
    granted_at: int
    expires_at: int
    reclaimed: bool


@dataclass(frozen=True, slots=True)
class Version:
    """One committed version of one breaker row."""

    at: int
    """When it was committed."""
    state: str
    round: int
    written_at: int
    evidence_at: int | None
    """Arrival of the newest report in it; the replica that took that report acts on it before the commit."""
    permits: tuple[Permit, ...]

    def live(self, now: int) -> list[Permit]:
        return [permit for permit in self.permits if not permit.reclaimed and now < permit.expires_at]


@dataclass(frozen=True, slots=True)
class Ended:
    """A permit that a version no longer shows as holding a slot, before its expiry."""

    permit: Permit
    at: int
    deciders: frozenset[str]
    """Decisions whose report may have ended it: its own, or a late alive verdict of a reclaimed permit."""


async def read_history(connection: Any) -> dict[str, list[Version]]:
    """Versions by provider, in order."""
    found: dict[str, list[Version]] = defaultdict(list)
    for record in await connection.fetch(READ):
        permits = tuple(
            Permit(p["id"], p["decision_id"], p["granted_at"], p["expires_at"], p["reclaimed"])
            for p in json.loads(record["permits"])
        )
        version = Version(
            record["at"],
            record["state"].upper(),
            record["round"],
            record["written_at"],
            record["evidence_at"],
            permits,
        )
        found[record["provider"]].append(version)
    return found


def edges(versions: Sequence[Version]) -> int:
    """Entries into HALF_OPEN that were stored."""
    return len({version.round for version in versions if version.round and version.state == "HALF_OPEN"})


def over_admissions(versions: Sequence[Version], limit: int) -> int:
    """Versions that show more unexpired, unreclaimed permits than allowed, at the instant of their writing."""
    return sum(len(version.live(version.written_at)) > limit for version in versions)


def beside_stored(versions: Sequence[Version], at: int) -> bool:
    """Does a stored permit hold a slot at this instant, by the version then in force?"""
    in_force = [version for version in versions if version.at <= at][-1:]
    return any(version.live(at) for version in in_force)


def ended_early(versions: Sequence[Version]) -> Iterator[Ended]:
    """Permits that lost their slot before their expiry: each must be some outcome's doing, else it was overwritten."""
    for before, after in pairwise(versions):
        kept = {permit.id for permit in after.live(after.written_at)}
        deciders = frozenset(permit.decision_id for permit in before.permits)
        for permit in before.live(after.written_at):
            if permit.id not in kept:
                yield Ended(permit, after.written_at, deciders)


def granted(versions: Sequence[Version]) -> dict[str, Permit]:
    """Every permit ever shown, by id, as it was shown last."""
    return {permit.id: permit for version in versions for permit in version.permits}


def blocked_throughout(versions: Sequence[Version], since: int, until: int) -> bool:
    """Was the breaker OPEN or HALF_OPEN from `since` to `until`, by commits and by evidence that was under way?"""
    in_force = [v for v in versions if v.at <= since][-1:] + [v for v in versions if since < v.at <= until]
    coming = [v for v in versions if v.at > until and v.evidence_at is not None and v.evidence_at <= until]
    known = bool(in_force) and in_force[0].at <= since
    return known and all(version.state in BLOCKING for version in (*in_force, *coming))
