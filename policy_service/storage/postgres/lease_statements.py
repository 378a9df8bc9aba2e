"""The SQL of the lease table; see `statements` for the form of reads."""

from __future__ import annotations

from policy_service.application.ports_leases import GRANT_KEPT_MS
from policy_service.storage.postgres.statements import NOW_MS
from policy_service.storage.postgres.tables import FACT, LEASE

LOCK_KEYS = "SELECT pg_advisory_xact_lock(key) FROM (SELECT unnest($1::bigint[]) AS key ORDER BY 1) AS sorted"
"""$1 keys."""

LOCK_ROWS = """
SELECT id FROM lease WHERE state = 'ACTIVE' AND (owner_hash = ANY($1::text[]) OR connection_id = ANY($2::text[]))
ORDER BY id FOR UPDATE"""
"""$1 owners, $2 connections. Rows are locked after the sort."""
SHARE_ROWS = "SELECT id FROM lease WHERE state = 'ACTIVE' AND owner_hash = ANY($1::text[]) ORDER BY id FOR SHARE"
"""$1 owners. Waits for whoever is about to end a lease of theirs."""
LOCK_LAPSED = f"""
SELECT id FROM lease WHERE state = 'ACTIVE' AND expires_at <= {NOW_MS} ORDER BY id FOR UPDATE SKIP LOCKED"""
"""A sweep waits for nobody and nobody for it: whoever works on a lapsed row ends it as well."""

_GRANTED = f"""(SELECT convert_from(answer, 'UTF8')::bigint FROM report_answer
    WHERE event_id = $5::text AND written_at > {NOW_MS} - {GRANT_KEPT_MS})"""
_HEAD = f"""
SELECT 'head' AS tag, json_build_object('now', {NOW_MS}, 'epoch', coalesce(max(epoch), 1),
  'raised_at', coalesce(max(raised_at), 0),
  'newest_revision', (SELECT coalesce(max(revision), 0) FROM catalogue_revision),
  'listed_at', (SELECT created_at FROM catalogue_revision WHERE revision = $4::bigint),
  'granted', {_GRANTED})::text AS body
FROM fleet"""

_OF_SCOPE = f"""
  SELECT id FROM lease WHERE state = 'ACTIVE' AND owner_hash = ANY($1::text[])
  UNION
  SELECT id FROM lease WHERE state = 'ACTIVE' AND connection_id = ANY($2::text[])
  UNION
  SELECT newest.id FROM unnest($1::text[]) AS o (name) CROSS JOIN LATERAL (
    SELECT id FROM lease WHERE owner_hash = o.name ORDER BY generation DESC, id DESC LIMIT 1) AS newest
  UNION
  SELECT newest.id FROM unnest($1::text[]) AS o (name) CROSS JOIN LATERAL (
    SELECT id FROM lease WHERE owner_hash = o.name AND generation = coalesce({_GRANTED}, $3::bigint)
    ORDER BY id DESC LIMIT 1) AS newest
  UNION
  SELECT newest.id FROM unnest($2::text[]) AS c (name) CROSS JOIN LATERAL (
    SELECT id FROM lease WHERE connection_id = c.name ORDER BY id DESC LIMIT 1) AS newest"""

READ = f"{_HEAD}\nUNION ALL\nSELECT 'row', to_jsonb(l)::text FROM lease l WHERE l.id IN ({_OF_SCOPE})"
"""$1 owners, $2 connections, $3 generation, $4 catalogue revision, $5 idempotency key."""
READ_EVERYTHING = f"""{READ}
UNION
SELECT 'row', to_jsonb(l)::text FROM lease l WHERE state = 'ACTIVE'"""

REMEMBER = f"""
INSERT INTO report_answer (event_id, answer, written_at) VALUES ($1, convert_to($2::text, 'UTF8'), {NOW_MS})
ON CONFLICT (event_id) DO UPDATE SET answer = excluded.answer, written_at = excluded.written_at"""
"""$1 idempotency key, $2 generation."""

_COLUMNS = [column.name for column in LEASE.columns if column.name != "id"]
_FACT_COLUMNS = [column.name for column in FACT.columns if column.name != "seq"]
_CHANGING = ("provider", "state", "ttl_ms", "renewed_at", "expires_at", "ended_at", "end_reason")


def _list(names: list[str], prefix: str = "") -> str:
    return ", ".join(f'{prefix}"{name}"' for name in names)


_RECORD = f"""WITH facts AS (
  INSERT INTO fact ({_list(_FACT_COLUMNS)}) SELECT {_list(_FACT_COLUMNS, "r.")}
  FROM jsonb_populate_recordset(NULL::fact, $2::jsonb) AS r ON CONFLICT (id) DO NOTHING)
"""

UPDATE = f"""{_RECORD}UPDATE lease AS l SET {", ".join(f"{name} = r.{name}" for name in _CHANGING)}
FROM jsonb_populate_recordset(NULL::lease, $1::jsonb) AS r WHERE l.id = r.id"""
INSERT = f"""{_RECORD}INSERT INTO lease ({_list(_COLUMNS)}) SELECT {_list(_COLUMNS, "r.")}
FROM jsonb_populate_recordset(NULL::lease, $1::jsonb) AS r"""
"""$1 rows, $2 facts."""
