"""The SQL of the store, generated from the tables: few statements, each of them one round trip.

Each read answers (tag, JSON text) pairs, so that one statement with one snapshot can read every table at once.
Numbered parameters are documented at each statement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from sqlalchemy import Table

from policy_service.storage.postgres.tables import FACT, STATE_TABLES

CHANNEL = "policy_state"

NOW_MS = "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
SNAPSHOT_MS = "floor(extract(epoch FROM statement_timestamp()) * 1000)::bigint"
"""Arrival of the statement: never later than its snapshot, so that a view does not claim to be newer than it is."""

CLOCK = f"SELECT {NOW_MS}"

ENSURE_GUARDS = "INSERT INTO guard (provider) SELECT unnest($1::text[]) ORDER BY 1 ON CONFLICT DO NOTHING"
"""$1 providers."""
LOCK_GUARDS = "SELECT provider FROM guard WHERE provider = ANY($1::text[]) ORDER BY provider FOR UPDATE"
"""$1 providers. Rows are locked after the sort, hence in ascending order."""
LOCK_ALL_GUARDS = "SELECT provider FROM guard ORDER BY provider FOR UPDATE"

KNOWN_ANSWER = "SELECT answer FROM report_answer WHERE event_id = $1"

IDENTITY = """
SELECT system_identifier::text,
  ('x' || lpad(substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8), 16, '0'))::bit(64)::bigint
FROM pg_control_system()"""
ADOPT_IDENTITY = f"""
INSERT INTO fleet AS f (epoch, system_identifier, timeline) SELECT 1, $1, $2
WHERE NOT EXISTS (SELECT FROM fleet WHERE (system_identifier, timeline) = ($1::text, $2::bigint))
ON CONFLICT (id) DO UPDATE SET epoch = f.epoch + 1, system_identifier = excluded.system_identifier,
  timeline = excluded.timeline, raised_at = {NOW_MS}
WHERE (f.system_identifier, f.timeline) IS DISTINCT FROM (excluded.system_identifier, excluded.timeline)"""
"""$1 system identifier, $2 timeline. Only the first replica that sees a change raises the epoch; the others, which is
the rule, write and lock nothing."""

LOCK_FLEET = "SELECT epoch FROM fleet FOR UPDATE"
NEWEST_CATALOGUE = (
    "SELECT revision, document, sha256, created_at FROM catalogue_revision ORDER BY revision DESC LIMIT 1"
)
CATALOGUE = "SELECT revision, document, sha256, created_at FROM catalogue_revision WHERE revision = $1"
"""$1 revision."""
WAS_IMPORTED = "SELECT 1 FROM catalogue_import WHERE sha256 = $1"
ADD_CATALOGUE = f"""
WITH seen AS (INSERT INTO catalogue_import (sha256, imported_at) VALUES ($2, {NOW_MS}) ON CONFLICT DO NOTHING),
added AS (
  INSERT INTO catalogue_revision (revision, document, sha256, created_at, actor)
  SELECT coalesce(max(revision), 0) + 1, $1, $2, {NOW_MS}, $3 FROM catalogue_revision
  RETURNING revision, document, sha256, created_at)
SELECT added.*, pg_notify('{CHANNEL}', '')::text FROM added"""
"""$1 document, $2 sha256, $3 actor."""

SECRETS = "SELECT key_version, secret FROM fleet_secret ORDER BY key_version"
ADD_SECRET = f"""
INSERT INTO fleet_secret (key_version, secret, created_at) VALUES ($1, $2, {NOW_MS}) ON CONFLICT DO NOTHING"""
"""$1 key version, $2 secret."""

FACT_FILTERS = ("provider", "connection", "decision_id", "mechanism")


def facts(columns: tuple[str, ...], *, is_continued: bool) -> str:
    """Facts, newest first, where the columns have the values $2 and following; $1 limit.

    The last parameter of a continued page is the sequence number before which it begins.
    """
    conditions = [f"{column} = ${number}" for number, column in enumerate(columns, 2)]
    if is_continued:
        conditions.append(f"seq < ${len(columns) + 2}")
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    return f"SELECT seq, to_jsonb(f)::text FROM fact f {where}ORDER BY seq DESC LIMIT $1::bigint"


_HEAD = f"""
SELECT 'head' AS tag, json_build_object('as_of', {SNAPSHOT_MS}, 'epoch', epoch,
  'snapshot', pg_current_snapshot()::text, 'pruned', feed_pruned::text,
  'revision', (SELECT coalesce(max(revision), 0) FROM catalogue_revision))::text AS body
FROM fleet
UNION ALL
SELECT 'progress', json_build_object('incarnation', incarnation, 'number', last_number)::text FROM replica"""

POLL = f"""{_HEAD}
UNION ALL
SELECT kind, json_build_object('version', version, 'row', row, 'written_at', written_at)::text
FROM state_feed WHERE xid >= $1::text::xid8 AND NOT pg_visible_in_snapshot(xid, $2::text::pg_snapshot)"""
"""$1 xmin of the previous poll's snapshot, which the index can use; $2 that snapshot: what it saw was brought."""

LOAD = _HEAD + "".join(
    f"""
UNION ALL
SELECT '{kind}', json_build_object('version', version, 'row', to_jsonb(t))::text FROM "{kind}" t"""
    for kind in STATE_TABLES
)

SIGHTED_BEFORE = "SELECT DISTINCT provider, connection FROM egress_sighting WHERE seen_at < $1 LIMIT $2::bigint"
"""$1 instant, $2 connections at most. A tombstone was seen at no instant."""

PRUNED_AT_ONCE = 10_000
"""Rows that one statement deletes at most; the next pruning goes on."""

PRUNE_FEED = f"""
WITH gone AS (
  DELETE FROM state_feed WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM state_feed WHERE written_at < $1 AND xid < pg_snapshot_xmin(pg_current_snapshot())
    LIMIT {PRUNED_AT_ONCE}))
  RETURNING xid),
newest AS (SELECT xid FROM gone ORDER BY xid DESC LIMIT 1),
mark AS (UPDATE fleet SET feed_pruned = newest.xid FROM newest WHERE newest.xid > fleet.feed_pruned)
SELECT count(*) FROM gone"""
"""$1 oldest instant kept. Rows that a running poll may still ask for stay: a watermark is some snapshot's xmin."""


def prune_by_age(table: str, column: str) -> str:
    """Delete rows older than $1."""
    return _prune(table, f'"{column}" < $1')


def prune_tombstones(kind: str) -> str:
    """Delete rows that have been default since before $1."""
    return _prune(kind, "is_default AND written_at < $1")


def _prune(table: str, condition: str) -> str:
    """The condition is tested again on each row, which may have been written anew since it was found."""
    found = f'SELECT ctid FROM "{table}" WHERE {condition} LIMIT {PRUNED_AT_ONCE}'
    delete = f'DELETE FROM "{table}" WHERE ctid = ANY (ARRAY({found})) AND {condition} RETURNING 1'
    return f"WITH gone AS ({delete}) SELECT count(*) FROM gone"


@lru_cache(maxsize=4)
def read_scope(*, has_whole: bool, is_everything: bool) -> str:
    """Statement after the lock: instant, a fresh version, known answers, and the rows of the scope.

    $1, $2 (provider, connection) pairs; $3 event ids; $4 providers to read as a whole.
    """
    parts = [
        f"SELECT 'head' AS tag, json_build_object('now', {NOW_MS}, 'version', nextval('row_version'))::text AS body",
        "SELECT 'answer', json_build_object('id', event_id, 'answer', encode(answer, 'base64'))::text "
        "FROM report_answer WHERE event_id = ANY($3::text[])",
        "SELECT 'unused', NULL WHERE $4::text[] IS NULL AND $1::text[] IS NULL AND $2::text[] IS NULL",
    ]
    for kind, table in STATE_TABLES.items():
        parts.extend(_scope_reads(kind, table, has_whole=has_whole, is_everything=is_everything))
    return "\nUNION ALL\n".join(parts)


def _scope_reads(kind: str, table: Table, *, has_whole: bool, is_everything: bool) -> Iterable[str]:
    """The first key column names the guard row, whatever it is called."""
    row, guard = f"SELECT '{kind}', to_jsonb(t)::text FROM", next(iter(table.primary_key.columns)).name
    if is_everything:
        return [f'{row} "{kind}" t']
    whole = [f'{row} "{kind}" t WHERE "{guard}" = ANY($4::text[])'] if has_whole else []
    if "connection" in table.primary_key.columns:
        pairs = "unnest($1::text[], $2::text[]) AS s (guard, connection)"
        return [f'{row} {pairs} JOIN "{kind}" t ON t."{guard}" = s.guard AND t.connection = s.connection', *whole]
    return [f'{row} "{kind}" t WHERE "{guard}" = ANY($1::text[])', *whole]


@lru_cache(maxsize=256)
def write_changes(upserted: frozenset[str], deleted: frozenset[str], *, announce: bool) -> str:
    """Everything that one unit leaves, in one statement; answers the number of answers inserted.

    $1 one JSON object: `=kind` rows to write, `-kind` rows to delete, `feed`, `facts`, `answers`, `progress`.
    """
    parts = [f"upsert_{kind} AS ({_upsert(kind, STATE_TABLES[kind])})" for kind in sorted(upserted)]
    parts += [f"delete_{kind} AS ({_delete(kind, STATE_TABLES[kind])})" for kind in sorted(deleted)]
    notify = f", pg_notify('{CHANNEL}', '')::text" if announce else ""
    body = ",\n".join(["p AS (SELECT $1::jsonb AS d)", *parts, *_BOOKS])
    return f"WITH {body}\nSELECT (SELECT count(*) FROM answers){notify}"


def _records(table: str, member: str) -> str:
    return f"""p, jsonb_populate_recordset(NULL::"{table}", p.d->'{member}') AS r"""


def _quoted(names: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f'{prefix}"{name}"' for name in names)


def _upsert(kind: str, table: Table) -> str:
    names = [column.name for column in table.columns]
    keys = [column.name for column in table.primary_key.columns]
    updates = ", ".join(f'"{name}" = excluded."{name}"' for name in names if name not in keys)
    return (
        f'INSERT INTO "{kind}" ({_quoted(names)}) SELECT {_quoted(names, "r.")} FROM {_records(kind, f"={kind}")} '
        f"ON CONFLICT ({_quoted(keys)}) DO UPDATE SET {updates}"
    )


def _delete(kind: str, table: Table) -> str:
    matches = " AND ".join(f't."{column.name}" = r."{column.name}"' for column in table.primary_key.columns)
    return f'DELETE FROM "{kind}" t USING {_records(kind, f"-{kind}")} WHERE {matches}'


_FACT_COLUMNS = [column.name for column in FACT.columns if column.name != "seq"]

_BOOKS = (
    "feed AS (INSERT INTO state_feed (version, kind, key, row, written_at) "
    f"SELECT r.version, r.kind, r.key, r.row, r.written_at FROM {_records('state_feed', 'feed')})",
    f"facts AS (INSERT INTO fact ({_quoted(_FACT_COLUMNS)}) SELECT {_quoted(_FACT_COLUMNS, 'r.')} "
    f"FROM {_records('fact', 'facts')} ON CONFLICT (id) DO NOTHING)",
    "answers AS (INSERT INTO report_answer (event_id, answer, written_at) "
    "SELECT r->>'id', decode(r->>'answer', 'base64'), (r->>'at')::bigint "
    "FROM p, jsonb_array_elements(p.d->'answers') AS r ON CONFLICT DO NOTHING RETURNING 1)",
    "progress AS (INSERT INTO replica AS old (incarnation, last_number, seen_at) "
    f"SELECT r.incarnation, r.last_number, r.seen_at FROM {_records('replica', 'progress')} "
    "ON CONFLICT (incarnation) DO UPDATE SET last_number = greatest(old.last_number, excluded.last_number), "
    "seen_at = excluded.seen_at)",
)
