"""Alembic migrations of the Postgres schema; installed as `policy_service.migrations`."""
