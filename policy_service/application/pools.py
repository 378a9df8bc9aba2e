"""Pools: the targets of one request in configured order, ready for the gates.

A route is compiled once a catalogue revision; inline candidates make a pool of their own. An entry that names no
connection stands for every declared connection of its provider, in order of priority number (account strategy
fill-first); where none is declared it stays open and only provider and model gates apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policy_service.application.messages import Candidate
from policy_service.domain.catalogue import Route
from policy_service.domain.ids import AuthClass, ConnectionId, ModelId, ProviderId, Target
from policy_service.domain.policy import Policy
from policy_service.domain.strategies import DEFAULT_STRATEGY
from policy_service.domain.strategies.round_robin import DEFAULT_STICKY_LIMIT

if TYPE_CHECKING:
    from policy_service.application.gating import Gated

NO_OPTIONS: Mapping[str, object] = {}
KNOWN_POOLS = 512
KNOWN_CANDIDATES = 1_000
"""Lists of inline candidates that are remembered: how many, and up to which length."""


@dataclass(slots=True)
class Pool:
    """Targets of one request. `accounts[i]` are the targets that entry i stands for (one where it is bound)."""

    route: str
    strategy: str
    accounts: Sequence[Sequence[Target]]
    weights: Sequence[float]
    keys: Sequence[str] = ()
    auth_classes: Sequence[AuthClass | None] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    caps: Sequence[int | None] = ()
    """Caps stated with inline candidates; empty where none states one."""
    quota_only: frozenset[int] = frozenset()
    """Entries that let only a quota failure go on to the next one (strategy priority)."""
    sticky_limit: int = DEFAULT_STICKY_LIMIT
    """Requests that a target serves in a row (strategy round-robin)."""
    gated: Gated | None = None
    """Newest gate result; kept by `Gating` while nothing changes."""

    @property
    def size(self) -> int:
        """Number of configured entries."""
        return len(self.accounts)

    def key(self, position: int) -> str:
        """Key of an entry; empty where none was given."""
        return self.keys[position] if self.keys else ""

    def auth_class(self, position: int) -> AuthClass | None:
        """Auth class stated with an inline candidate."""
        return self.auth_classes[position] if self.auth_classes else None


class Pools:
    """Compiled routes of one policy revision and the making of inline pools."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._by_provider = _declared_connections(policy)
        self._known: dict[tuple[tuple[Candidate, ...], str], Pool] = {}
        self._routes = {route.name: self._compile(route) for route in policy.catalogue.routes.values()}

    def route(self, name: str) -> Pool | None:
        """Pool of a named route; None where there is no such route."""
        return self._routes.get(name)

    def inline(self, candidates: tuple[Candidate, ...], strategy: str, options: Mapping[str, object] | None) -> Pool:
        """Pool of inline candidates; the same list named again finds its pool, and with it its gate result."""
        if options is not None:
            return self._inline(candidates, strategy, options)
        key = (candidates, strategy)
        pool = self._known.get(key)
        if pool is None:
            pool = self._inline(candidates, strategy, NO_OPTIONS)
            if len(candidates) <= KNOWN_CANDIDATES:
                if len(self._known) >= KNOWN_POOLS:
                    self._known.clear()
                self._known[key] = pool
        return pool

    def _inline(self, candidates: Sequence[Candidate], strategy: str, options: Mapping[str, object]) -> Pool:
        """Ordered by priority number where any is given (stable)."""
        chosen = strategy or DEFAULT_STRATEGY
        if chosen == DEFAULT_STRATEGY and any(c.priority for c in candidates):
            candidates = sorted(candidates, key=lambda c: c.priority)
        canonical = self.policy.canonical
        expand = self._expand
        accounts: list[tuple[Target, ...]] = []
        for provider, connection, model, *_ in candidates:
            name = canonical(provider)
            if connection or name not in self._by_provider:
                accounts.append((Target(name, connection, model),))  # type: ignore[arg-type]
            else:
                accounts.append(expand(name, connection, model))
        return Pool(
            "",
            chosen,
            accounts,
            [c.weight for c in candidates],
            [c.key for c in candidates],
            [c.auth_class for c in candidates],
            options,
            [c.max_concurrent for c in candidates] if any(c.max_concurrent for c in candidates) else (),
            frozenset(i for i, c in enumerate(candidates) if c.fallback_only_on_quota),
        )

    def _compile(self, route: Route) -> Pool:
        strategy = route.strategy or DEFAULT_STRATEGY
        targets = route.targets
        if strategy == DEFAULT_STRATEGY and any(t.priority for t in targets):
            targets = tuple(sorted(targets, key=lambda t: t.priority))
        canonical = self.policy.canonical
        return Pool(
            route.name,
            strategy,
            tuple(self._expand(canonical(t.provider), t.connection, t.model) for t in targets),
            tuple(t.weight for t in targets),
            tuple(t.key for t in targets),
            (),
            route.options,
            (),
            frozenset(i for i, t in enumerate(targets) if t.fallback_only_on_quota),
            self._sticky_limit(route),
        )

    def _sticky_limit(self, route: Route) -> int:
        """The route's own option, else the setting."""
        own = route.options.get("sticky_round_robin_limit")
        return own if isinstance(own, int) else int(self.policy.setting("strategies.sticky_round_robin_limit"))

    def _expand(self, provider: str, connection: str, model: str) -> tuple[Target, ...]:
        declared = () if connection else self._by_provider.get(provider, ())
        names = declared or (connection,)
        return tuple(Target(ProviderId(provider), ConnectionId(name), ModelId(model)) for name in names)


def _declared_connections(policy: Policy) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[tuple[int, str]]] = {}
    for connection in policy.catalogue.connections.values():
        if connection.enabled:
            entry = (connection.priority, connection.id)
            found.setdefault(policy.canonical(connection.provider), []).append(entry)
    by_priority: Callable[[tuple[int, str]], int] = lambda entry: entry[0]  # noqa: E731
    return {p: tuple(name for _, name in sorted(items, key=by_priority)) for p, items in found.items()}
