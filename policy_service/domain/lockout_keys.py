"""Keys of a model lock: which models share a quota, and which of three keys a failure writes
(spec/model_lockout.md section 2). Pure; the families are data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from policy_service.domain.catalogue import Provider

FAMILY = "family"
BARE = "bare"
EXACT = "exact"
KEY_KINDS = (FAMILY, BARE, EXACT)
_FAMILY_STATUSES = frozenset({429, 403, 402})


class LockKey(NamedTuple):
    """Place of one lock: the kind under which it is stored and the text of the key."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class FamilyRule:
    """One quota family: the first rule of a scheme that matches a model names it."""

    family: str
    contains: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    def matches(self, model: str) -> bool:
        """True for a lower-case model name; a rule without texts matches every model."""
        if not self.contains and not self.prefixes:
            return True
        return any(text in model for text in self.contains) or model.startswith(self.prefixes or ("\0",))


@dataclass(frozen=True, slots=True)
class FamilyScheme:
    """How a provider groups its models. A model that no rule matches stands for itself."""

    rules: tuple[FamilyRule, ...]
    strips_path: bool = False
    """Drop the provider's prefix and one more path segment first."""


FAMILY_SCHEMES: Mapping[str, FamilyScheme] = {
    "codex": FamilyScheme((FamilyRule("spark", contains=("spark", "bengalfox")), FamilyRule("codex"))),
    "google_family": FamilyScheme(
        (
            FamilyRule("family:gemini", contains=("gemini",)),
            FamilyRule("family:claude", contains=("anthropic",), prefixes=("claude-", "cloud-")),
        ),
        strips_path=True,
    ),
    "tier": FamilyScheme(
        (
            FamilyRule("tier:core", contains=("core",)),
            FamilyRule("tier:premium", contains=("premium",)),
            FamilyRule("tier:standard"),
        )
    ),
}
"""By the catalogue's `quota_family`."""


def scoped_model(provider: Provider, model: str) -> str:
    """Name under which a model's quota is counted at its provider; the model itself without a family."""
    scheme = FAMILY_SCHEMES.get(provider.quota_family or "")
    if scheme is None:
        return model
    name = _without_path(provider.id, model) if scheme.strips_path else model
    lowered = name.lower()
    return next((rule.family for rule in scheme.rules if rule.matches(lowered)), name)


def _without_path(provider: str, model: str) -> str:
    name = model
    prefix = f"{provider}/"
    if name.lower().startswith(prefix):
        name = name[len(prefix) :]
    return name.partition("/")[2] or name


def key_of(kind: str, provider: Provider, model: str) -> LockKey:
    """Place of the lock of a kind; family and bare key of a model without a family are one place."""
    if kind == EXACT:
        return LockKey(EXACT, model.strip().lower())
    scoped = scoped_model(provider, model)
    return LockKey(BARE, model) if kind == BARE and scoped != model else LockKey(FAMILY, scoped)


def keys_of(provider: Provider, model: str) -> tuple[LockKey, ...]:
    """Every place at which a lock of this model can lie, without repetition."""
    return tuple(dict.fromkeys(key_of(kind, provider, model) for kind in KEY_KINDS))


def written_kind(status: int | None, reason: str, scope: str | None) -> str:
    """Kind of key that a failure writes; `scope` is the caller's explicit one or the provider's default."""
    if scope in KEY_KINDS:
        return scope
    if status == 404 or reason == "not_found":
        return BARE
    return FAMILY if status in _FAMILY_STATUSES else EXACT
