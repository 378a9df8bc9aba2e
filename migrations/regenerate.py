"""Rewrites `versions/0001_initial.py` from the tables. For use before the first release only; afterwards a change of
a row is a new revision (`alembic revision --autogenerate`).

    python -m policy_service.migrations.regenerate
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import render_op_text
from alembic.operations.ops import CreateIndexOp, CreateTableOp, MigrateOperation
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Table

from policy_service.storage.postgres.tables import METADATA, Xid8

TARGET = Path(__file__).parent / "versions" / "0001_initial.py"

HEADER = '''"""Initial schema: one table per kind of state row, and the books of the store."""

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
'''

DOWNGRADE = """

def downgrade() -> None:
    for table in {tables}:
        op.drop_table(table)
    for sequence in ("permit_ticket", "row_version"):
        op.execute(sa.schema.DropSequence(sa.Sequence(sequence)))
"""


def _renderer() -> AutogenContext:
    context = MigrationContext.configure(dialect_name="postgresql")
    options = {
        "sqlalchemy_module_prefix": "sa.",
        "alembic_module_prefix": "op.",
        "user_module_prefix": None,
        "render_item": lambda kind, item, _: "Xid8()" if kind == "type" and isinstance(item, Xid8) else False,
    }
    return AutogenContext(context, METADATA, opts=options)


def _function(table: Table, renderer: AutogenContext) -> str:
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    steps: list[MigrateOperation] = [CreateTableOp.from_table(table), *map(CreateIndexOp.from_index, indexes)]
    body = "\n".join(f"    {render_op_text(renderer, step)}" for step in steps)
    return f"\n\ndef _create_{table.name}() -> None:\n{body}\n"


def source() -> str:
    """Text of the migration."""
    tables = METADATA.sorted_tables
    calls = "".join(f"    _create_{table.name}()\n" for table in tables)
    functions = "".join(_function(table, _renderer()) for table in tables)
    return HEADER + calls + DOWNGRADE.format(tables=tuple(table.name for table in tables)) + functions


if __name__ == "__main__":
    TARGET.write_text(source())
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(TARGET)], check=True)
