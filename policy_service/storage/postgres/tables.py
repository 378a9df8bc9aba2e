"""Tables: one typed table per kind of state row, generated from its dataclass, and the books around them.

Row tables have the row's fields as columns, its key as primary key, and three columns of the store: `version`
(fleet-wide), `is_default` (a tombstone) and `written_at` (ms).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Identity,
    Index,
    LargeBinary,
    MetaData,
    Sequence,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.schema import SchemaItem
from sqlalchemy.sql import text
from sqlalchemy.types import TypeEngine, UserDefinedType

from policy_service.domain.facts import Fact
from policy_service.domain.gates import PermitRow
from policy_service.domain.lease import LeaseRow
from policy_service.domain.state import Row
from policy_service.storage.codec import ColumnType, FieldCodec, key_columns, row_codec
from policy_service.storage.rows import STATE_ROWS

METADATA = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pk",
        "ix": "%(table_name)s_%(column_0_N_name)s",
        "ck": "%(table_name)s_%(constraint_name)s_ck",
    }
)

STORE_COLUMNS = ("version", "is_default", "written_at")

ROW_VERSION = Sequence("row_version", metadata=METADATA, data_type=BigInteger)
"""Versions of rows, drawn under the guard lock."""


class Xid8(UserDefinedType[str]):
    """64-bit transaction id: it never wraps, so that it orders transactions for ever."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "xid8"


ischema_names["xid8"] = Xid8
"""Known to reflection, so that a migrated schema can be compared with these tables."""

SQL_TYPES: Mapping[ColumnType, type[TypeEngine[Any]]] = {
    ColumnType.BIGINT: BigInteger,
    ColumnType.TEXT: Text,
    ColumnType.BOOLEAN: Boolean,
    ColumnType.DOUBLE: Double,
    ColumnType.JSONB: JSONB,
}


def _column(field: FieldCodec, keys: tuple[str, ...]) -> Column[Any]:
    codec = field.codec
    return Column(field.name, SQL_TYPES[codec.type](), primary_key=field.name in keys, nullable=codec.is_nullable)


def _number(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _table(name: str, *items: SchemaItem) -> Table:
    return Table(name, METADATA, *items)


def state_table(row_type: type[Row]) -> Table:
    """Table of one kind of row."""
    keys = key_columns(row_type)
    columns = [_column(field, keys) for field in row_codec(row_type).fields]
    is_default = Column("is_default", Boolean, nullable=False)
    return _table(row_type.KIND, *columns, _number("version"), is_default, _number("written_at"))


STATE_TABLES: Mapping[str, Table] = {row_type.KIND: state_table(row_type) for row_type in STATE_ROWS}

GUARD = _table("guard", Column("provider", Text, primary_key=True))
"""One row per canonical provider, never deleted; whoever holds its lock may change the provider's rows."""

STATE_FEED = _table(
    "state_feed",
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),
    Column("key", JSONB, primary_key=True),
    Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
    Column("row", JSONB, nullable=False),
    _number("written_at"),
    Index(None, "xid"),
    Index(None, "written_at"),
)
"""Changes of state rows by transaction; a deleted row is announced as its default."""

REPORT_ANSWER = _table(
    "report_answer",
    Column("event_id", Text, primary_key=True),
    Column("answer", LargeBinary, nullable=False),
    _number("written_at"),
    Index(None, "written_at"),
)
"""Idempotency records of reports."""

REPLICA = _table(
    "replica",
    Column("incarnation", Text, primary_key=True),
    _number("last_number"),
    _number("seen_at"),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("release", Text, nullable=False, server_default=text("''")),
    Column("alive_until", BigInteger, nullable=False, server_default=text("0")),
)
"""Last event number that each replica incarnation has committed, and until when its newest signature stands."""

FACT = _table(
    "fact",
    Column("seq", BigInteger, Identity(always=True), primary_key=True),
    *(_column(field, ()) for field in row_codec(Fact).fields),
    Index(None, "id", unique=True),
    Index(None, "at"),
    Index(None, "provider", "connection", "seq"),
    Index(None, "decision_id", "seq", postgresql_where=text("decision_id <> ''")),
)
"""Transitions, append only; `seq` is the paging order, `id` the fact's own id."""

CATALOGUE_REVISION = _table(
    "catalogue_revision",
    Column("revision", BigInteger, primary_key=True, autoincrement=False),
    Column("document", Text, nullable=False),
    Column("sha256", Text, nullable=False),
    _number("created_at"),
    Column("actor", Text, nullable=False),
)

CATALOGUE_IMPORT = _table("catalogue_import", Column("sha256", Text, primary_key=True), _number("imported_at"))
"""Hashes of every document ever imported: a restart imports none of them again."""

FLEET_SECRET = _table(
    "fleet_secret",
    Column("key_version", BigInteger, primary_key=True, autoincrement=False),
    Column("secret", LargeBinary, nullable=False),
    _number("created_at"),
)

FLEET = _table(
    "fleet",
    Column("id", Boolean, primary_key=True, server_default=text("true")),
    _number("epoch"),
    Column("system_identifier", Text, nullable=False),
    _number("timeline"),
    Column("feed_pruned", Xid8, nullable=False, server_default=text("'0'")),
    Column("raised_at", BigInteger, nullable=False, server_default=text("0")),
)
"""One row. `epoch` rises (at `raised_at`) when another server or timeline answers; `feed_pruned` is the newest
transaction whose feed rows were pruned."""

PERMIT_TICKET = Sequence("permit_ticket", metadata=METADATA, data_type=BigInteger)
"""Places in line, drawn while the gates are locked: their order is the order of the lock."""

GATE = _table(
    "gate",
    Column("key", Text, primary_key=True),
    Column("slots", BigInteger),
    _number("depth"),
    Column("blocked_until", BigInteger),
    Column("pace", JSONB),
    Column("configured", JSONB),
    _number("revision"),
    _number("touched_at"),
)
"""Gates; whoever holds a row's lock may change the permits of the gate. `configured` is the configuration taken over
last, of catalogue `revision`; `pace` moves with starts and with what the limiter learns."""

PERMIT = _table(
    "permit",
    *(
        Column("gates", ARRAY(Text), nullable=False)
        if field.name == "gates"
        else _column(field, ("gate", "request_id"))
        for field in row_codec(PermitRow).fields
    ),
    Index("permit_live", "gate", postgresql_where=text("ended_at IS NULL")),
    Index("permit_ended", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    Index(None, "permit_id"),
    Index(None, "request_id"),
)
"""Holders and waiters, one row per gate and request; ended rows stay a while and never change."""

LEASE = _table(
    "lease",
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    *(_column(field, ()) for field in row_codec(LeaseRow).fields if field.name != "id"),
    CheckConstraint("owner_hash ~ '^[0-9a-f]{64}$'", name="owner_hash"),
    CheckConstraint("generation BETWEEN 1 AND 9007199254740991", name="generation"),
    CheckConstraint("state IN ('ACTIVE', 'RELEASED', 'EXPIRED', 'INVALIDATED')", name="state"),
    CheckConstraint(
        "(state = 'ACTIVE') = (ended_at IS NULL) AND (ended_at IS NULL) = (end_reason IS NULL)", name="end"
    ),
    Index(None, "owner_hash", unique=True, postgresql_where=text("state = 'ACTIVE'")),
    Index(None, "connection_id", unique=True, postgresql_where=text("state = 'ACTIVE'")),
    Index(None, "owner_hash", "generation", "id"),
    Index(None, "connection_id", "id"),
    Index(None, "state", "expires_at"),
)
"""One row per lease period, never deleted: history is what makes generations grow (spec/leases.md section 3)."""

SESSION_PIN = _table(
    "session_pin",
    Column("api_key_id", Text, primary_key=True),
    Column("provider", Text, primary_key=True),
    Column("session_hash", Text, primary_key=True),
    Column("connection_id", Text, nullable=False),
    _number("created_at"),
    _number("last_used_at"),
    _number("expires_at"),
    _number("version"),
    Index(None, "expires_at"),
    Index(None, "connection_id", "expires_at"),
)
"""Pins of sessions to connections; `version` is new with every connection, a refresh keeps it."""
