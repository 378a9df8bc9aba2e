"""Resolved policy settings with their sources, and the bounds of one setting that depend on another.

A bound between settings never refuses a value: the dependent one is stored as given and clamped when read
(spec/operator_surface.md section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policy_service.domain import setting_specs
from policy_service.domain.policy import effective_degradation
from policy_service.domain.settings import REGISTRY, SettingSources


@dataclass(frozen=True, slots=True)
class Resolved:
    """One setting as it is in force. `source`: stored, environment, catalogue, connection or default."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Bound:
    """`dependent` is read as `clamp(own value, value of other)`."""

    dependent: str
    other: str
    clamp: Callable[[Any, Any], Any]


BOUNDS: tuple[Bound, ...] = (
    *(
        Bound(
            f"breaker.{auth}.degradation_threshold",
            f"breaker.{auth}.failure_threshold",
            lambda own, threshold: effective_degradation(threshold, own),
        )
        for auth in setting_specs.CLASSES
    ),
    Bound("provider_cooldown.max_ms", "provider_cooldown.min_ms", max),
    Bound("quota_preflight.warn_percent", "quota_preflight.cutoff_percent", lambda own, cutoff: max(own, cutoff + 1)),
    Bound("cooldown_wait.budget_ms", "cooldown_wait.max_wait_ms", max),
    Bound("direct_wait.budget_ms", "direct_wait.max_retry_wait_s", lambda own, longest: max(own, longest * 1000)),
    Bound("model_lockout.max_cooldown_ms", "model_lockout.base_cooldown_ms", max),
)
_BY_DEPENDENT = {bound.dependent: bound for bound in BOUNDS}


def resolve(sources: SettingSources, name: str) -> Resolved:
    """One setting in force, bounds applied.

    Raises:
        KeyError: unknown name.
    """
    value, source = _raw(sources, name)
    bound = _BY_DEPENDENT.get(name)
    return Resolved(bound.clamp(value, _raw(sources, bound.other)[0]) if bound else value, source)


def _raw(sources: SettingSources, name: str) -> tuple[Any, str]:
    if name == "provider_cooldown.enabled":
        return _either(sources, name)
    return sources.resolve_with_source(name)


def _either(sources: SettingSources, name: str) -> tuple[bool, str]:
    """On when the stored value or the environment says so (spec/README.md, Configuration 2)."""
    value, source = sources.resolve_with_source(name)
    if sources.any_source_on(name) and value is not True:
        return True, "environment"
    return bool(value), source


def resolve_all(sources: SettingSources) -> Mapping[str, Resolved]:
    """Every setting in force, by dotted name."""
    return {name: resolve(sources, name) for name in REGISTRY}


# -- names below /api/resilience ---------------------------------------------------------------------------
REST_NAMES: Mapping[str, str] = {spec.rest: name for name, spec in REGISTRY.items() if spec.rest}
"""REST name -> setting name."""
_HIDDEN = frozenset({"affinity.legacy_ttl_ms"})


def rest_values(sources: SettingSources) -> Mapping[str, Resolved]:
    """Settings in force under their REST names, dotted."""
    return {rest: resolve(sources, name) for rest, name in REST_NAMES.items() if name not in _HIDDEN}


def rest_document(sources: SettingSources, *, with_sources: bool = False) -> dict[str, Any]:
    """Body of GET /api/resilience: nested; with `with_sources` also `sources`, dotted name to source."""
    resolved = rest_values(sources)
    body = nested((rest, plain(found.value)) for rest, found in resolved.items())
    return body | {"sources": {rest: found.source for rest, found in resolved.items()}} if with_sources else body


def nested(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Dotted names as nested mappings."""
    body: dict[str, Any] = {}
    for dotted, value in pairs:
        *outer, last = dotted.split(".")
        block = body
        for part in outer:
            block = block.setdefault(part, {})
        block[last] = value
    return body


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value
