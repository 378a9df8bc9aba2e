"""Runs terminal state vectors (spec/terminal_states.md); the schema is that of connection cooldown."""

from __future__ import annotations

from tests.vectors.run_connection_cooldown import run

__all__ = ["run"]
