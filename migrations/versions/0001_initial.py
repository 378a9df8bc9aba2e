"""Initial schema: one table per kind of state row, and the books of the store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from policy_service.storage.postgres.tables import Xid8

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    for sequence in ("permit_ticket", "row_version"):
        op.execute(sa.schema.CreateSequence(sa.Sequence(sequence, data_type=sa.BigInteger)))
    _create_breaker()
    _create_breaker_burst()
    _create_catalogue_import()
    _create_catalogue_revision()
    _create_connection()
    _create_egress_sighting()
    _create_fact()
    _create_family_pool()
    _create_fleet()
    _create_fleet_secret()
    _create_gate()
    _create_guard()
    _create_lease()
    _create_model_lock()
    _create_permit()
    _create_pool_panic()
    _create_provider_cooldown()
    _create_replica()
    _create_report_answer()
    _create_session_pin()
    _create_state_feed()
    _create_usage_wall()


def downgrade() -> None:
    for table in (
        "breaker",
        "breaker_burst",
        "catalogue_import",
        "catalogue_revision",
        "connection",
        "egress_sighting",
        "fact",
        "family_pool",
        "fleet",
        "fleet_secret",
        "gate",
        "guard",
        "lease",
        "model_lock",
        "permit",
        "pool_panic",
        "provider_cooldown",
        "replica",
        "report_answer",
        "session_pin",
        "state_feed",
        "usage_wall",
    ):
        op.drop_table(table)
    for sequence in ("permit_ticket", "row_version"):
        op.execute(sa.schema.DropSequence(sa.Sequence(sequence)))


def _create_breaker() -> None:
    op.create_table(
        "breaker",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("override", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("generation_since", sa.BigInteger(), nullable=True),
        sa.Column("failure_count", sa.BigInteger(), nullable=False),
        sa.Column("last_failure_at", sa.BigInteger(), nullable=True),
        sa.Column("last_failure_kind", sa.Text(), nullable=False),
        sa.Column("rate_limit_count", sa.BigInteger(), nullable=False),
        sa.Column("quota_exhausted_count", sa.BigInteger(), nullable=False),
        sa.Column("transient_count", sa.BigInteger(), nullable=False),
        sa.Column("open_cycle_count", sa.BigInteger(), nullable=False),
        sa.Column("reopen_at", sa.BigInteger(), nullable=True),
        sa.Column("half_open_alive", sa.BigInteger(), nullable=False),
        sa.Column("half_open_round", sa.BigInteger(), nullable=False),
        sa.Column("permits", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("last_event_at", sa.BigInteger(), nullable=True),
        sa.Column("quorum_replicas", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("quorum_connections", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("replica_opens", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("closed_at", sa.BigInteger(), nullable=True),
        sa.Column("ramp_cycles", sa.BigInteger(), nullable=False),
        sa.Column("ramp_failures", sa.BigInteger(), nullable=False),
        sa.Column("ramp_asked", sa.BigInteger(), nullable=False),
        sa.Column("ramp_admitted", sa.BigInteger(), nullable=False),
        sa.Column("fact_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", name=op.f("breaker_pk")),
    )


def _create_breaker_burst() -> None:
    op.create_table(
        "breaker_burst",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("last_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", name=op.f("breaker_burst_pk")),
    )


def _create_catalogue_import() -> None:
    op.create_table(
        "catalogue_import",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("imported_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("catalogue_import_pk")),
    )


def _create_catalogue_revision() -> None:
    op.create_table(
        "catalogue_revision",
        sa.Column("revision", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("catalogue_revision_pk")),
    )


def _create_connection() -> None:
    op.create_table(
        "connection",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("test_status", sa.Text(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("rate_limited_until", sa.BigInteger(), nullable=True),
        sa.Column("limited_since", sa.BigInteger(), nullable=True),
        sa.Column("hint_source", sa.Text(), nullable=False),
        sa.Column("backoff_level", sa.BigInteger(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("last_error_type", sa.Text(), nullable=False),
        sa.Column("last_error_source", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=False),
        sa.Column("last_error_at", sa.BigInteger(), nullable=True),
        sa.Column("streak", sa.BigInteger(), nullable=False),
        sa.Column("streak_at", sa.BigInteger(), nullable=True),
        sa.Column("streak_until", sa.BigInteger(), nullable=True),
        sa.Column("retry_attempts", sa.BigInteger(), nullable=False),
        sa.Column("retry_at", sa.BigInteger(), nullable=True),
        sa.Column("retry_permit", sa.Text(), nullable=False),
        sa.Column("retry_permit_until", sa.BigInteger(), nullable=True),
        sa.Column("soft_strikes", sa.BigInteger(), nullable=False),
        sa.Column("soft_since", sa.BigInteger(), nullable=True),
        sa.Column("token_expires_at", sa.BigInteger(), nullable=True),
        sa.Column("quota_reset_at", sa.BigInteger(), nullable=True),
        sa.Column("rotation_failures", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("early_probe", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("last_event_at", sa.BigInteger(), nullable=True),
        sa.Column("fact_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", name=op.f("connection_pk")),
    )


def _create_egress_sighting() -> None:
    op.create_table(
        "egress_sighting",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", "address", name=op.f("egress_sighting_pk")),
    )


def _create_fact() -> None:
    op.create_table(
        "fact",
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("mechanism", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("from_state", sa.Text(), nullable=False),
        sa.Column("to_state", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("deadline_at", sa.BigInteger(), nullable=True),
        sa.Column("decision_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("restated_status", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("rule_id", sa.Text(), nullable=True),
        sa.Column("hint_source", sa.Text(), nullable=True),
        sa.Column("hint_ms", sa.BigInteger(), nullable=True),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("failure_count", sa.BigInteger(), nullable=True),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("fact_pk")),
    )
    op.create_index(op.f("fact_at"), "fact", ["at"], unique=False)
    op.create_index(
        op.f("fact_decision_id_seq"),
        "fact",
        ["decision_id", "seq"],
        unique=False,
        postgresql_where=sa.text("decision_id <> ''"),
    )
    op.create_index(op.f("fact_id"), "fact", ["id"], unique=True)
    op.create_index(op.f("fact_provider_connection_seq"), "fact", ["provider", "connection", "seq"], unique=False)


def _create_family_pool() -> None:
    op.create_table(
        "family_pool",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("limited_until", sa.BigInteger(), nullable=True),
        sa.Column("limited_at", sa.BigInteger(), nullable=True),
        sa.Column("last_event_at", sa.BigInteger(), nullable=True),
        sa.Column("fact_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", "pool", name=op.f("family_pool_pk")),
    )


def _create_fleet() -> None:
    op.create_table(
        "fleet",
        sa.Column("id", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("system_identifier", sa.Text(), nullable=False),
        sa.Column("timeline", sa.BigInteger(), nullable=False),
        sa.Column("feed_pruned", Xid8(), server_default=sa.text("'0'"), nullable=False),
        sa.Column("raised_at", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("fleet_pk")),
    )


def _create_fleet_secret() -> None:
    op.create_table(
        "fleet_secret",
        sa.Column("key_version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_version", name=op.f("fleet_secret_pk")),
    )


def _create_gate() -> None:
    op.create_table(
        "gate",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=True),
        sa.Column("depth", sa.BigInteger(), nullable=False),
        sa.Column("blocked_until", sa.BigInteger(), nullable=True),
        sa.Column("pace", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("configured", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("touched_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("gate_pk")),
    )


def _create_guard() -> None:
    op.create_table(
        "guard",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("provider", name=op.f("guard_pk")),
    )


def _create_lease() -> None:
    op.create_table(
        "lease",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("owner_hash", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection_id", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("ttl_ms", sa.BigInteger(), nullable=False),
        sa.Column("acquired_at", sa.BigInteger(), nullable=False),
        sa.Column("renewed_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(state = 'ACTIVE') = (ended_at IS NULL) AND (ended_at IS NULL) = (end_reason IS NULL)",
            name=op.f("lease_end_ck"),
        ),
        sa.CheckConstraint("owner_hash ~ '^[0-9a-f]{64}$'", name=op.f("lease_owner_hash_ck")),
        sa.CheckConstraint("state IN ('ACTIVE', 'RELEASED', 'EXPIRED', 'INVALIDATED')", name=op.f("lease_state_ck")),
        sa.CheckConstraint("generation BETWEEN 1 AND 9007199254740991", name=op.f("lease_generation_ck")),
        sa.PrimaryKeyConstraint("id", name=op.f("lease_pk")),
    )
    op.create_index(
        op.f("lease_connection_id"),
        "lease",
        ["connection_id"],
        unique=True,
        postgresql_where=sa.text("state = 'ACTIVE'"),
    )
    op.create_index(op.f("lease_connection_id_id"), "lease", ["connection_id", "id"], unique=False)
    op.create_index(
        op.f("lease_owner_hash"), "lease", ["owner_hash"], unique=True, postgresql_where=sa.text("state = 'ACTIVE'")
    )
    op.create_index(op.f("lease_owner_hash_generation_id"), "lease", ["owner_hash", "generation", "id"], unique=False)
    op.create_index(op.f("lease_state_expires_at"), "lease", ["state", "expires_at"], unique=False)


def _create_model_lock() -> None:
    op.create_table(
        "model_lock",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("key_kind", sa.Text(), nullable=False),
        sa.Column("model_key", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.Column("locked_at", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("failure_count", sa.BigInteger(), nullable=False),
        sa.Column("last_failure_at", sa.BigInteger(), nullable=True),
        sa.Column("reset_after_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_cooldown_ms", sa.BigInteger(), nullable=False),
        sa.Column("hint_source", sa.Text(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("slow_events", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("slow_step", sa.BigInteger(), nullable=False),
        sa.Column("early_probe", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("last_event_at", sa.BigInteger(), nullable=True),
        sa.Column("fact_id", sa.Text(), nullable=False),
        sa.Column("written_as", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", "key_kind", "model_key", name=op.f("model_lock_pk")),
    )


def _create_permit() -> None:
    op.create_table(
        "permit",
        sa.Column("permit_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("gate", sa.Text(), nullable=False),
        sa.Column("gates", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("ticket", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("queued_at", sa.BigInteger(), nullable=False),
        sa.Column("ttl_ms", sa.BigInteger(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("deadline_at", sa.BigInteger(), nullable=True),
        sa.Column("waiter_seen_at", sa.BigInteger(), nullable=True),
        sa.Column("offered_until", sa.BigInteger(), nullable=True),
        sa.Column("missed_at", sa.BigInteger(), nullable=True),
        sa.Column("max_held_ms", sa.BigInteger(), nullable=True),
        sa.Column("granted_at", sa.BigInteger(), nullable=True),
        sa.Column("held_at", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.BigInteger(), nullable=True),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", "gate", name=op.f("permit_pk")),
    )
    op.create_index(
        "permit_ended", "permit", ["ended_at"], unique=False, postgresql_where=sa.text("ended_at IS NOT NULL")
    )
    op.create_index("permit_live", "permit", ["gate"], unique=False, postgresql_where=sa.text("ended_at IS NULL"))
    op.create_index(op.f("permit_permit_id"), "permit", ["permit_id"], unique=False)
    op.create_index(op.f("permit_request_id"), "permit", ["request_id"], unique=False)


def _create_pool_panic() -> None:
    op.create_table(
        "pool_panic",
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("permits", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("pool", name=op.f("pool_panic_pk")),
    )


def _create_provider_cooldown() -> None:
    op.create_table(
        "provider_cooldown",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("failures", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("cooling_until", sa.BigInteger(), nullable=True),
        sa.Column("last_failure_at", sa.BigInteger(), nullable=True),
        sa.Column("last_event_at", sa.BigInteger(), nullable=True),
        sa.Column("fact_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", name=op.f("provider_cooldown_pk")),
    )


def _create_replica() -> None:
    op.create_table(
        "replica",
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("incarnation", name=op.f("replica_pk")),
    )


def _create_report_answer() -> None:
    op.create_table(
        "report_answer",
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("answer", sa.LargeBinary(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("report_answer_pk")),
    )
    op.create_index(op.f("report_answer_written_at"), "report_answer", ["written_at"], unique=False)


def _create_session_pin() -> None:
    op.create_table(
        "session_pin",
        sa.Column("api_key_id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("session_hash", sa.Text(), nullable=False),
        sa.Column("connection_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("api_key_id", "provider", "session_hash", name=op.f("session_pin_pk")),
    )
    op.create_index(
        op.f("session_pin_connection_id_expires_at"), "session_pin", ["connection_id", "expires_at"], unique=False
    )
    op.create_index(op.f("session_pin_expires_at"), "session_pin", ["expires_at"], unique=False)


def _create_state_feed() -> None:
    op.create_table(
        "state_feed",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("xid", Xid8(), server_default=sa.text("pg_current_xact_id()"), nullable=False),
        sa.Column("row", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("version", "kind", "key", name=op.f("state_feed_pk")),
    )
    op.create_index(op.f("state_feed_written_at"), "state_feed", ["written_at"], unique=False)
    op.create_index(op.f("state_feed_xid"), "state_feed", ["xid"], unique=False)


def _create_usage_wall() -> None:
    op.create_table(
        "usage_wall",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("connection", sa.Text(), nullable=False),
        sa.Column("resets_at_s", sa.BigInteger(), nullable=True),
        sa.Column("accepted_at", sa.BigInteger(), nullable=True),
        sa.Column("retry_after_ms", sa.BigInteger(), nullable=False),
        sa.Column("max_wait_ms", sa.BigInteger(), nullable=False),
        sa.Column("requests_served", sa.BigInteger(), nullable=False),
        sa.Column("requests_served_standard", sa.BigInteger(), nullable=False),
        sa.Column("budget_utilization", sa.Double(), nullable=True),
        sa.Column("budget_spent_until", sa.BigInteger(), nullable=True),
        sa.Column("cooling_off_until", sa.BigInteger(), nullable=True),
        sa.Column("granted_at", sa.BigInteger(), nullable=True),
        sa.Column("not_before", sa.BigInteger(), nullable=True),
        sa.Column("claim", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("touched_at", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_default", sa.Boolean(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "connection", name=op.f("usage_wall_pk")),
    )
