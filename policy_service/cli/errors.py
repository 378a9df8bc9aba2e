"""Known errors as messages and exit codes."""

from __future__ import annotations

from policy_service.cli import exit_codes
from policy_service.cli.output import note, problems


def report_error(error: Exception) -> int:
    """Print a known error and return its exit code; an unknown one is raised again."""
    from policy_service.application.ports import SchemaMismatchError, StoreUnavailableError
    from policy_service.settings.problems import ConfigError
    from policy_service.transport.grpc.tls import ListenError

    if isinstance(error, ConfigError):
        problems(error.problems)
        note(f"{len(error.problems)} problem(s); nothing was started or changed")
        return exit_codes.CONFIGURATION
    if isinstance(error, ListenError):
        note(f"error: {error}")
        return exit_codes.FAILED
    if isinstance(error, SchemaMismatchError):
        note(f"error: {error}")
        return exit_codes.SCHEMA
    if isinstance(error, StoreUnavailableError):
        note(f"error: database: {error}; check its address, that it runs, and that it lets this host in")
        return exit_codes.STORE_AWAY
    raise error
