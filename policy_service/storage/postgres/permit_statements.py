"""The SQL of gates and permits; numbered parameters are documented at each statement."""

from __future__ import annotations

from policy_service.domain.gates import KEEP_ENDED_MS, WAITER_LOST_MS, PermitRow
from policy_service.storage.codec import row_codec
from policy_service.storage.postgres.statements import CHANNEL, NOW_MS, PRUNED_AT_ONCE

COLUMNS = tuple(field.name for field in row_codec(PermitRow).fields)
"""In the order of the fields of PermitRow."""
_KEYS = ("gate", "request_id")
_ROW = ", ".join(f"p.{name}" for name in COLUMNS)
WHOLE_LINE = 1 << 62
"""In place of a number of heads: everybody in line."""
GATE_IDLE_MS = 86_400_000
"""A gate that nobody has used for so long is forgotten, and with it what its limiter has learned."""

ENSURE_GATES = f"""
INSERT INTO gate (key, depth, revision, touched_at)
SELECT key, 20, 0, {NOW_MS} FROM unnest($1::text[]) AS key ORDER BY key ON CONFLICT DO NOTHING"""
"""$1 keys. Configured by the unit that needs them, under their lock."""
LOCK_GATES = """
SELECT key, slots, depth, blocked_until, pace::text, configured::text, revision
FROM gate WHERE key = ANY($1::text[]) ORDER BY key FOR UPDATE"""
"""$1 keys. Rows are locked after the sort, hence in ascending order."""

FAILED_OVER = "SELECT max(raised_at) FROM fleet WHERE epoch > 1"
"""When the database failed over last; null: never, as far as is known."""

FIND = """
SELECT permit_id, request_id, gates FROM permit WHERE permit_id = $1::text
UNION ALL SELECT '', request_id, gates FROM permit
WHERE gate = ANY($2::text[]) AND ended_at IS NULL AND state = 'WAITING'"""
"""$1 permit id, $2 gates whose waiters are meant. All of it is fixed for the life of a row."""
PERMITS_OF_CALL = """
SELECT DISTINCT permit_id FROM permit WHERE request_id = $1::text AND gates = $2::text[]"""
"""$1 id of the call, $2 all gates of the permit."""

PERMITS_OF_REQUEST = """
SELECT DISTINCT permit_id FROM permit
WHERE starts_with(request_id, $1::text) AND substr(request_id, length($1::text) + 1) ~ $2::text"""
"""$1 id of the client request, $2 pattern of what follows it in the ids of its calls."""

_IS_DUE = f"""CASE WHEN state = 'HELD' THEN expires_at <= now
  ELSE deadline_at <= now OR offered_until <= now OR waiter_seen_at <= now - {WAITER_LOST_MS} END"""
_IS_SILENT = "missed_at IS NOT NULL AND coalesce(waiter_seen_at, 0) < missed_at"

READ = f"""
WITH head AS MATERIALIZED (
  SELECT {NOW_MS} AS now, CASE WHEN $3::boolean THEN nextval('permit_ticket') ELSE 0 END AS ticket),
live AS MATERIALIZED (SELECT * FROM permit WHERE gate = ANY($1::text[]) AND ended_at IS NULL),
placed AS (
  SELECT request_id, state <> 'WAITING' OR offered_until IS NOT NULL OR {_IS_DUE} AS counts,
    CASE WHEN state = 'WAITING' AND offered_until IS NULL AND NOT ({_IS_SILENT}) THEN
      row_number() OVER (
        PARTITION BY gate, state, offered_until IS NULL, {_IS_SILENT} ORDER BY live.ticket) END AS place
  FROM live, head),
chosen AS MATERIALIZED (
  SELECT request_id FROM placed WHERE counts OR coalesce(place, {WHOLE_LINE}) <= $4::bigint
  UNION SELECT unnest($2::text[])),
found AS (
  SELECT {_ROW} FROM live p WHERE p.request_id IN (SELECT request_id FROM chosen)
  UNION ALL
  SELECT {_ROW} FROM permit p
  WHERE p.gate = ANY($1::text[]) AND p.request_id = ANY($2::text[] || $5::text[]) AND p.ended_at IS NOT NULL),
behind AS (
  SELECT gate, count(*) AS number FROM live WHERE request_id NOT IN (SELECT request_id FROM chosen) GROUP BY gate)
SELECT head.now, head.ticket, (SELECT json_object_agg(gate, number)::text FROM behind), p.*
FROM head LEFT JOIN found p ON true"""
"""$1 locked gates, $2 requests that are wanted with their ended rows, $3 draw a ticket, $4 heads of the lines to read,
$5 requests whose ended rows are wanted.

A statement after the lock. Of a long line only its head can be served; those behind are counted. A request that is
read is read in all locked gates."""

WRITE = f"""
WITH d AS (SELECT $1::jsonb AS d),
gates AS (
  UPDATE gate g SET slots = r.slots, depth = r.depth, blocked_until = r.blocked_until, pace = r.pace,
    configured = r.configured, revision = r.revision, touched_at = r.touched_at
  FROM d, jsonb_populate_recordset(NULL::gate, d.d->'gates') AS r WHERE g.key = r.key)
INSERT INTO permit ({", ".join(COLUMNS)})
SELECT {", ".join(f"r.{name}" for name in COLUMNS)} FROM d, jsonb_populate_recordset(NULL::permit, d.d->'rows') AS r
ON CONFLICT (gate, request_id) DO UPDATE SET
{", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in _KEYS)}"""
"""$1 one JSON object: `gates` and `rows` to write."""

WAKE = f"SELECT pg_notify('{CHANNEL}', $1)::text"
"""$1 payload."""

BEAT = f"""
WITH mine AS (
  SELECT gate, request_id FROM permit
  WHERE request_id = ANY($1::text[]) AND ended_at IS NULL AND state = 'WAITING' FOR UPDATE SKIP LOCKED)
UPDATE permit p SET waiter_seen_at = {NOW_MS}, replica = $2 FROM mine
WHERE p.gate = mine.gate AND p.request_id = mine.request_id RETURNING p.request_id"""
"""$1 request ids, $2 replica. Never waits: a row that is locked is being looked after; three beats must be missed."""

_MAY_START = """coalesce((pace->>'last_start_at')::bigint + (pace->>'gap_ms')::bigint <= now, true)
  AND coalesce((pace->>'tokens')::bigint > 0 OR (pace->>'refill_at')::bigint <= now, true)"""

DUE = f"""
WITH clock AS MATERIALIZED (SELECT {NOW_MS} AS now)
SELECT true, request_id FROM permit
WHERE request_id = ANY($1::text[]) AND (state <> 'WAITING' OR offered_until IS NOT NULL)
UNION
SELECT false, gate FROM permit, clock WHERE gate = ANY($2::text[]) AND ended_at IS NULL AND {_IS_DUE}
UNION
SELECT false, key FROM gate, clock WHERE key = ANY($2::text[]) AND coalesce(blocked_until, 0) <= now AND {_MAY_START}
  AND EXISTS (SELECT FROM permit p WHERE p.gate = key AND p.ended_at IS NULL AND state = 'WAITING'
    AND offered_until IS NULL)
  AND (slots IS NULL OR slots > (SELECT count(*) FROM permit p WHERE p.gate = key AND p.ended_at IS NULL
    AND (state = 'HELD' OR offered_until IS NOT NULL)))"""
"""$1 own waiting requests, $2 their gates: those where time has ended something or that have room for their line."""
OVERDUE = f"""
WITH clock AS MATERIALIZED (SELECT {NOW_MS} AS now)
SELECT DISTINCT gate FROM permit, clock WHERE ended_at IS NULL AND {_IS_DUE} ORDER BY gate"""

_COUNTS = """
SELECT gate, count(*) FILTER (WHERE state = 'HELD') AS held, count(*) FILTER (WHERE state = 'WAITING') AS waiting,
  min(expires_at) FILTER (WHERE state = 'HELD') AS first FROM permit WHERE ended_at IS NULL GROUP BY gate"""
COUNTS = f"SELECT gate, held, waiting, first FROM ({_COUNTS}) AS c"
LIST = f"""
SELECT g.key, g.slots, g.depth, g.blocked_until, g.pace::text, g.configured::text, g.revision, coalesce(c.held, 0),
  coalesce(c.waiting, 0), c.first
FROM gate g LEFT JOIN ({_COUNTS}) AS c ON c.gate = g.key
WHERE starts_with(g.key, $1) AND (c.gate IS NOT NULL OR g.blocked_until > {NOW_MS}) ORDER BY g.key COLLATE "C" """
"""$1 prefix."""

PRUNE_ROWS = f"""
WITH gone AS (
  DELETE FROM permit WHERE (gate, request_id) IN (
    SELECT gate, request_id FROM permit WHERE ended_at <= {NOW_MS} - {KEEP_ENDED_MS}
    LIMIT {PRUNED_AT_ONCE} FOR UPDATE SKIP LOCKED)
  RETURNING 1)
SELECT count(*) FROM gone"""
PRUNE_GATES = f"""
DELETE FROM gate WHERE key IN (
  SELECT key FROM gate g WHERE touched_at <= {NOW_MS} - {GATE_IDLE_MS}
    AND coalesce(blocked_until, 0) <= {NOW_MS} AND NOT EXISTS (SELECT FROM permit p WHERE p.gate = g.key)
  LIMIT {PRUNED_AT_ONCE} FOR UPDATE SKIP LOCKED)"""
"""Under the lock of the row, so that no unit is at work on it; a unit that comes later makes it anew."""
