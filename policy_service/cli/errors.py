"""Known errors as messages and exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policy_service.cli import exit_codes
from policy_service.cli.output import note, problems


def require_text(arguments: Sequence[str]) -> None:
    """Refuse arguments whose bytes are no UTF-8 before they reach an address, a log or a database.

    Raises:
        ConfigError: one of them.
    """
    from policy_service.settings.problems import ConfigError, Problem, shown

    for place, text in enumerate(arguments, start=1):
        if not text.isprintable() and any("\ud800" <= each <= "\udfff" for each in text):
            raise ConfigError([Problem(f"argument {place}", "not UTF-8", shown(text), "UTF-8 text")])


def write_text(path: Path, option: str, text: str) -> None:
    """Write a file that an option names.

    Raises:
        ConfigError: it cannot be written.
    """
    from policy_service.settings.problems import ConfigError, Problem

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([Problem(option, f"cannot be written: {reason}", str(path), "a file to write")]) from None


def report_error(error: Exception) -> int:
    """Print a known error and return its exit code; an unknown one is raised again."""
    from policy_service.application.ports import SchemaMismatchError, StoreUnavailableError
    from policy_service.settings.problems import ConfigError
    from policy_service.storage.postgres.embedded_host import EmbeddedServerError
    from policy_service.transport.grpc.tls import ListenError

    if isinstance(error, ConfigError):
        problems(error.problems)
        note(f"{len(error.problems)} problem(s); nothing was started or changed")
        return exit_codes.CONFIGURATION
    if isinstance(error, ListenError):
        note(f"error: {error}")
        return exit_codes.FAILED
    if isinstance(error, EmbeddedServerError):
        note(f"error: embedded database: {error}; check --data-dir, or name a server with --database-url")
        return exit_codes.FAILED
    if isinstance(error, SchemaMismatchError):
        note(f"error: {error}")
        return exit_codes.SCHEMA
    if isinstance(error, StoreUnavailableError):
        note(f"error: database: {error}; check its address, that it runs, and that it lets this host in")
        return exit_codes.STORE_AWAY
    raise error
