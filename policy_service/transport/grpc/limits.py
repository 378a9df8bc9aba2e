"""Limits of one call, and the collector of what is wrong with a request.

Every reader of a request adds its findings here, so that a caller sees all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_service.application.errors import FieldProblem, InvalidRequestError

MAX_ID_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
MAX_SESSION_KEY_CHARS = 4_096
MAX_EARLIER_ATTEMPTS = 100
MAX_ALLOWED_CONNECTIONS = 1_000
MAX_FALLBACKS = 100
DEFAULT_FALLBACKS = 8
MAX_ATTEMPT = 1_000
MAX_WAIT_MS = 86_400_000
MAX_PIN_TTL_MS = 2_592_000_000
MAX_ERROR_TEXT_CHARS = 4_096
HEADER_BYTES = 65_536
SESSION_HEADERS = frozenset({"x-codex-session-id", "x-session-id", "x-omniroute-session"})


@dataclass(frozen=True, slots=True)
class Limits:
    """Configurable limits; sizes in bytes."""

    message_bytes: int = 4_194_304
    concurrent_calls: int = 2_000
    candidates: int = 10_000
    batch: int = 1_000
    headers: int = 256
    body_bytes: int = 65_536


class Problems:
    """Findings of one request, in the order of its fields."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[FieldProblem] = []

    def add(self, path: str, problem: str, remedy: str = "", reason: str = "INVALID_FIELD") -> None:
        """Note one finding; `path` as in the contract, such as `candidates[3].weight`."""
        self.found.append(FieldProblem(path, problem, remedy, reason))

    def require(self, path: str, problem: str, remedy: str = "") -> None:
        """Note that something is missing."""
        self.add(path, problem, remedy, "FIELD_REQUIRED")

    def too_large(self, path: str, problem: str, remedy: str) -> None:
        """Note that something is larger than its limit."""
        self.add(path, problem, remedy, "TOO_LARGE")

    def text(self, path: str, value: str, limit: int = MAX_ID_CHARS) -> None:
        """Check an id: at most `limit` printable characters (control characters never reach a key or a row)."""
        if len(value) > limit:
            self.too_large(path, f"{len(value)} characters", f"at most {limit}")
        elif not value.isprintable():
            self.add(path, "contains control characters", "printable characters only")

    def between(self, path: str, value: float | None, low: float, high: float) -> None:
        """Check a number; None and both bounds pass, NaN does not."""
        if value is not None and not low <= value <= high:
            self.add(path, f"{value} is out of range", f"{low:g} .. {high:g}")

    def count(self, path: str, size: int, limit: int) -> None:
        """Check the length of a list."""
        if size > limit:
            self.too_large(path, f"{size} items", f"at most {limit}")

    def settle(self) -> None:
        """Raise InvalidRequestError if anything was found."""
        if self.found:
            reason = self.found[0].reason if len(self.found) == 1 else "INVALID_REQUEST"
            raise InvalidRequestError(tuple(self.found), reason=reason)
