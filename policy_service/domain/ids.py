"""Identifiers and small enumerations that every other domain module uses.

Look-alike values get their own types. Nothing here knows a mechanism.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, NewType

ProviderId = NewType("ProviderId", str)
"""Canonical provider id, lower case, aliases already resolved."""
ConnectionId = NewType("ConnectionId", str)
"""One account or key of a provider; empty where the caller named none."""
ModelId = NewType("ModelId", str)
"""Model id as sent upstream; empty where the call names none."""
Instant = int
"""Database time, whole milliseconds since the Unix epoch."""
DurationMs = int
"""Whole milliseconds."""


class AuthClass(StrEnum):
    """Class of credential; selects the profile of numbers (spec/README.md, Vocabulary)."""

    OAUTH = "oauth"
    API_KEY = "api_key"
    LOCAL = "local"
    NONE = "default"
    """Unprofiled: the provider is unknown and the caller stated no class."""


class Target(NamedTuple):
    """Where one call may go: provider + connection + model."""

    provider: ProviderId
    connection: ConnectionId
    model: ModelId


class HintSource(StrEnum):
    """Who stated a waiting time (spec/retry_hints.md)."""

    HEADER = "header"
    RETRY_INFO = "google_rpc_retry_info"
    BODY = "body"


SERVER_STATED = frozenset({HintSource.HEADER, HintSource.RETRY_INFO})
"""Sources whose deadlines may exceed the lockout cap and are never overridden by panic mode."""


class Generations(NamedTuple):
    """Fence numbers a decision was given, one per kind of key (spec/README.md, Generations)."""

    breaker: int = 1
    connection: int = 1
    model_lock: int = 1
