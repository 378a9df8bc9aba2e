"""When a failure was last heard of a key, counted or not; and the roll that living replicas sign."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

HEARD = ("breaker", "connection", "model_lock")


def upgrade() -> None:
    for table in HEARD:
        op.add_column(table, sa.Column("failure_heard_at", sa.BigInteger(), nullable=True))
    for name in ("name", "release"):
        op.add_column("replica", sa.Column(name, sa.Text(), server_default=sa.text("''"), nullable=False))
    op.add_column("replica", sa.Column("alive_until", sa.BigInteger(), server_default=sa.text("0"), nullable=False))


def downgrade() -> None:
    for name in ("alive_until", "release", "name"):
        op.drop_column("replica", name)
    for table in HEARD:
        op.drop_column(table, "failure_heard_at")
