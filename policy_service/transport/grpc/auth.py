"""Bearer keys of the gRPC surface: several at a time for rotation, kept as SHA-256, with scopes.

Without any key the server is open (loopback and Unix sockets). Comparison is constant-time over all keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from hmac import compare_digest

from policy_service.application.errors import ForbiddenError, UnauthenticatedError

Metadata = Sequence[tuple[str, str | bytes]]


class Scope(StrEnum):
    """What a key may call."""

    POLICY = "policy"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class BearerKey:
    """One key. `sha256` is lower-case hex; `name` is the actor of admin acts."""

    sha256: str
    scopes: frozenset[Scope]
    name: str = ""


def bearer_keys(policy: Iterable[str], admin: Iterable[str]) -> tuple[BearerKey, ...]:
    """Keys from two sets of SHA-256 texts; an admin key may call PolicyService too."""
    both = frozenset(Scope)
    admins = [BearerKey(text, both, f"admin-key-{text[:8]}") for text in sorted(admin)]
    return (*admins, *(BearerKey(text, frozenset({Scope.POLICY}), f"key-{text[:8]}") for text in sorted(policy)))


class KeyRing:
    """The configured keys; false when there are none.

    Args:
        keys: keys in force.
        admin_is_open: without any keys AdminService is open too (the server listens on loopback only).
    """

    def __init__(self, keys: Sequence[BearerKey] = (), *, admin_is_open: bool = True) -> None:
        self._keys = tuple((key.sha256.encode(), key) for key in keys)
        self._admin_is_open = admin_is_open

    def guards(self, scope: Scope) -> bool:
        """True if calls of the scope need a key."""
        return bool(self._keys) or (scope is Scope.ADMIN and not self._admin_is_open)

    def authorise(self, metadata: Metadata, scope: Scope) -> str:
        """Name of the key of a call.

        Raises:
            UnauthenticatedError: no key, or an unknown one.
            ForbiddenError: the key lacks the scope.
        """
        key = self._find(_presented(metadata))
        if scope not in key.scopes:
            raise ForbiddenError(f"this key lacks the scope {scope.value!r}", metadata={"scope": scope.value})
        return key.name

    def _find(self, presented: str) -> BearerKey:
        digest = sha256(presented.encode("utf-8", "surrogateescape")).hexdigest().encode()
        # No early exit: the time taken says nothing about which key, if any, was close.
        matches = [key for known, key in self._keys if compare_digest(known, digest)]
        if not matches:
            raise UnauthenticatedError("unknown key", reason="CREDENTIALS_INVALID")
        return matches[0]


def _presented(metadata: Metadata) -> str:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value[:7].lower() == "bearer ":
            return value[7:].strip()
    raise UnauthenticatedError("send `authorization: Bearer <key>` as metadata")
