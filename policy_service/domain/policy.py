"""The compiled policy of one catalogue revision: what every pure function gets as its configuration.

`Policy` holds the catalogue and the settings and hands out `ConnectionPolicy`, the bundle of profiles that
applies to one provider and connection. Compiled once a revision and memoised; pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.catalogue import Catalogue, Connection, OperatorRule, Provider, ProviderDirectory
from policy_service.domain.ids import AuthClass
from policy_service.domain.profiles import (
    BreakerProfile,
    EarlyProbeProfile,
    HintProfile,
    LadderProfile,
    LockoutProfile,
    PoolGuardProfile,
    ProviderCooldownProfile,
    QueueProfile,
    RotationProfile,
    SlowFirstOutput,
    TerminalProfile,
    WaitProfile,
)
from policy_service.domain.queue_admission import effective_profile, is_paced
from policy_service.domain.settings import REGISTRY, SettingSources

_KIND_OPEN_MS = {"rate_limit": 60_000, "quota_exhausted": 3_600_000}
_ROTATION_STATUSES = (429, 500, 502, 400)
_QUEUE = "queue."
_QUEUE_FIELDS = tuple(name for name in QueueProfile.__slots__ if name != "rpm_override")
_QUEUE_OVERRIDES = {
    "rpm": "requests_per_minute",
    "minTime": "min_time_between_requests_ms",
    "maxConcurrent": "concurrent_requests",
    "maxWaitMs": "max_wait_ms",
    "executionMaxWaitMs": "execution_max_wait_ms",
}
"""Overrides of a connection (queue_admission.md section 1) by the settings that state them in the catalogue."""
_DEFAULT_EGRESS_OFF = frozenset({"none", "off", "false", "0"})


Memo = dict[tuple[object, ...], "ConnectionPolicy"]
MEMO_ENTRIES = 50_000
"""Compiled policies that a memo keeps; what comes after them is compiled each time."""


@dataclass(frozen=True, slots=True)
class ConnectionPolicy:
    """Everything that applies to the outcomes of one connection."""

    provider: Provider
    connection: Connection
    auth_class: AuthClass
    breaker: BreakerProfile
    ladder: LadderProfile
    provider_cooldown: ProviderCooldownProfile
    lockout: LockoutProfile
    terminal: TerminalProfile
    hints: HintProfile
    rotation: RotationProfile
    early_probe: EarlyProbeProfile
    operator_rules: tuple[OperatorRule, ...]
    daily_reset_zone: str | None
    health_check_can_disable: bool
    in_egress_set: bool
    queue: QueueProfile | None = None
    """Pacing of the connection's requests; None: they are not paced (queue_admission.md)."""

    @property
    def counts_per_model(self) -> bool:
        """model_lockout.md section 3: the connection's flag wins over the catalogue."""
        flag = self.connection.passthrough_models
        return self.provider.counts_per_model if flag is None else flag

    @property
    def sees_full_text(self) -> bool:
        """Rules see body texts (restatement_and_rules.md sections 3 and 4)."""
        return self.provider.full_text_rules or bool(self.operator_rules)

    @property
    def honors_rule_scope(self) -> bool:
        """Scopes of matched rules have effect (restatement_and_rules.md sections 3 and 4)."""
        return self.provider.honors_rule_scope or bool(self.operator_rules)


class Policy:
    """One revision of catalogue and settings, ready for use.

    Args:
        catalogue: the whole catalogue; its `stored_settings` are the stored values.
        environment: process environment (only `POLICY_*` and the listed aliases are read).
        revision: number of the catalogue revision in the store, 0 without one.
        unlisted: class of a provider that is not in the catalogue where the call states none. The service takes
            API keys, which is what most unknown providers are called with.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        environment: Mapping[str, str] | None = None,
        revision: int = 0,
        *,
        unlisted: AuthClass = AuthClass.NONE,
    ) -> None:
        self._unlisted = unlisted
        self.catalogue = catalogue
        self.revision = revision
        self.sources = SettingSources(catalogue.stored_settings, environment or {})
        self.directory = ProviderDirectory(catalogue.providers)
        self.egress_providers = self._egress_providers()
        self.route_wait = self._route_wait()
        self.direct_wait = self._direct_wait()
        self.pool_guard = self._pool_guard()
        self._capped = frozenset(c.id for c in catalogue.connections.values() if (c.max_concurrent or 0) > 0)
        self.queue_fleet_limit = cast(int, self.setting("queue.global_concurrent_requests")) or None
        self.has_gates = bool(self._capped) or self._paces()
        self.disabled_connections = frozenset(c.id for c in catalogue.connections.values() if not c.enabled)
        self._memo: Memo = {}
        self._plain: Memo = {}
        """What connections without settings of their own share: a pool may name tens of thousands of them."""

    def is_capped(self, connection: str) -> bool:
        """True where `max_concurrent` of a declared connection is a limit (concurrency.md section 1)."""
        return connection in self._capped

    def address_of(self, connection: str) -> str:
        """host:port of a declared connection; empty where the gateway knows it."""
        declared = self.catalogue.connections.get(connection)
        return declared.address if declared else ""

    def _paces(self) -> bool:
        """True where any connection may be paced; else nobody has to ask."""
        blocks = [c.settings for c in self.catalogue.connections.values()]
        blocks += [p.profile for p in self.catalogue.providers.values()]
        return bool(self.setting("queue.auto_enable_api_key_providers")) or any(
            name.startswith(_QUEUE) for block in blocks for name in block
        )

    def canonical(self, provider: str) -> str:
        """Canonical id of a provider name or alias."""
        return self.directory.canonical(provider)

    def for_connection(
        self, provider: str, connection: str = "", auth_class: AuthClass | None = None
    ) -> ConnectionPolicy:
        """Profiles for one connection; `auth_class` is a hint for connections that are not declared."""
        key = (provider, connection, auth_class)
        found = self._memo.get(key)
        if found is None:
            declared = self._declared(provider, connection)
            compiled = (self._compile if declared.settings else self._share)(provider, declared, auth_class)
            return _kept(self._memo, key, compiled)
        return found

    def setting(self, name: str, connection: Connection | None = None) -> Any:
        """Resolved value of one setting; a fraction of the environment rounded up where a whole number is meant."""
        value = self.sources.resolve(name, connection=connection.settings if connection else None)
        return math.ceil(value) if isinstance(value, float) and REGISTRY[name].kind == "int" else value

    # -- compilation ---------------------------------------------------------------------------------
    def _declared(self, provider: str, connection: str) -> Connection:
        declared = self.catalogue.connections.get(connection)
        if declared is None or self.canonical(declared.provider) != self.canonical(provider):
            return Connection(id=connection, provider=self.directory.get(provider).id)
        return declared

    def _share(self, provider: str, declared: Connection, hint: AuthClass | None) -> ConnectionPolicy:
        key = (provider, declared.auth_class, hint, declared.enabled)
        found = self._plain.get(key)
        if found is None:
            found = _kept(self._plain, key, self._compile(provider, declared, hint))
        return replace(found, connection=declared)

    def _compile(self, provider: str, declared: Connection, hint: AuthClass | None) -> ConnectionPolicy:
        entry = self.directory.get(provider)
        auth = declared.auth_class or hint or entry.auth_class
        if hint is None and auth is AuthClass.NONE and not self.directory.is_known(provider):
            auth = self._unlisted
        reader = _Reader(self.sources, entry, declared, auth)
        wanted = self.canonical(provider)
        lockout = reader.lockout(wanted in map(self.canonical, reader.get("model_lockout.slow_first_output.providers")))
        rules = tuple(rule for rule in self.catalogue.operator_rules if self.canonical(rule.provider) == wanted)
        return ConnectionPolicy(
            provider=entry if entry.id == wanted else replace(entry, id=wanted),
            connection=declared,
            auth_class=auth,
            breaker=reader.breaker(),
            ladder=reader.ladder(lockout),
            provider_cooldown=reader.provider_cooldown(),
            lockout=lockout,
            terminal=reader.terminal(),
            hints=reader.hints(),
            rotation=reader.rotation(),
            early_probe=reader.early_probe(),
            operator_rules=rules,
            daily_reset_zone=cast("str | None", reader.get("daily_reset_zone")),
            health_check_can_disable=bool(reader.get("connection.health_check_can_disable")),
            in_egress_set=wanted in self.egress_providers,
            queue=reader.queue(),
        )

    def _egress_providers(self) -> frozenset[str]:
        text = str(self.sources.resolve("egress_lock.providers") or "").strip().lower()
        if not text:
            return frozenset(p.id for p in self.catalogue.providers.values() if p.egress_bucketed)
        if text in _DEFAULT_EGRESS_OFF:
            return frozenset()
        return frozenset(self.canonical(part) for part in text.split(",") if part.strip())

    def _route_wait(self) -> WaitProfile:
        get = self.sources.resolve
        longest = cast(int, get("cooldown_wait.max_wait_ms"))
        return WaitProfile(
            bool(get("cooldown_wait.enabled")),
            longest,
            cast(int, get("cooldown_wait.max_attempts")),
            max(longest, cast(int, get("cooldown_wait.budget_ms"))),
        )

    def _direct_wait(self) -> WaitProfile:
        get = self.sources.resolve
        longest = cast(int, get("direct_wait.max_retry_wait_s")) * 1000
        return WaitProfile(
            bool(get("direct_wait.enabled")),
            longest,
            cast(int, get("direct_wait.max_retries")),
            max(longest, cast(int, get("direct_wait.budget_ms"))),
        )

    def _pool_guard(self) -> PoolGuardProfile:
        get = self.sources.resolve
        return PoolGuardProfile(
            bool(get("pool_guard.enabled")),
            float(cast(float, get("pool_guard.max_excluded_share"))),
            cast(int, get("pool_guard.panic_max_in_flight")),
        )


def _kept(memo: Memo, key: tuple[object, ...], compiled: ConnectionPolicy) -> ConnectionPolicy:
    if len(memo) < MEMO_ENTRIES:
        memo[key] = compiled
    return compiled


class _Reader:
    """Reads one connection's settings: the class block, the catalogue override, the connection's own."""

    def __init__(self, sources: SettingSources, provider: Provider, connection: Connection, auth: AuthClass) -> None:
        self._sources = sources
        self._profile = provider.profile
        self._provider = provider
        self._connection = connection
        self._own = connection.settings
        self._auth = auth

    def get(self, name: str) -> Any:
        return self._sources.resolve(name, connection=self._own, catalogue=self._profile.get(name))

    def by_class(self, block: str, field: str, auth: AuthClass | None = None) -> Any:
        name = f"{block}.{auth or self._auth}.{field}"
        override = self._profile.get(f"{block}.{field}", self._profile.get(name))
        own: Mapping[str, object] = self._own
        if f"{block}.{field}" in own and name not in own:
            own = {**own, name: own[f"{block}.{field}"]}
        return self._sources.resolve(name, connection=own, catalogue=override)

    def breaker(self) -> BreakerProfile:
        threshold = self.by_class("breaker", "failure_threshold")
        explicit = self.by_class("breaker", "degradation_threshold")
        kind_hints = self.get("breaker.kind_hints")
        if kind_hints is None:
            kind_hints = self._provider.kind_hints_default and self._auth is not AuthClass.LOCAL
        profiled = self._auth in (AuthClass.OAUTH, AuthClass.API_KEY)
        return BreakerProfile(
            failure_threshold=threshold,
            degradation_threshold=effective_degradation(threshold, explicit),
            reset_timeout_ms=self.by_class("breaker", "reset_timeout_ms"),
            max_backoff_multiplier=self.by_class("breaker", "max_backoff_multiplier"),
            backoff_escalation_cycles=self.by_class("breaker", "backoff_escalation_cycles"),
            half_open_probes=self.get("breaker.half_open_probes"),
            successes_to_close=self.get("breaker.successes_to_close"),
            count_mode=self.get("breaker.count_mode"),
            kind_hints=bool(kind_hints) and profiled,
            kind_thresholds=self._provider.kind_thresholds,
            open_ms_by_kind=_KIND_OPEN_MS if profiled else {},
            per_connection=bool(self.get("breaker.per_connection")),
            reopen_jitter=float(self.get("breaker.reopen_jitter")),
            quorum_enabled=bool(self.get("breaker.quorum.enabled")),
            quorum_min_replicas=self.get("breaker.quorum.min_replicas"),
            quorum_min_connections=self.get("breaker.quorum.min_connections"),
            slow_start_enabled=bool(self.get("breaker.slow_start.enabled")),
            slow_start_duration_ms=self.get("breaker.slow_start.duration_ms"),
            slow_start_min_share=float(self.get("breaker.slow_start.min_share")),
            slow_start_aggression=float(self.get("breaker.slow_start.aggression")),
            slow_start_failure_budget=self.get("breaker.slow_start.failure_budget"),
        )

    def ladder(self, lockout: LockoutProfile) -> LadderProfile:
        profiled = self._auth in (AuthClass.OAUTH, AuthClass.API_KEY)
        return LadderProfile(
            base_cooldown_ms=math.ceil(self.by_class("connection", "base_cooldown_ms")),
            max_backoff_steps=int(self.by_class("connection", "max_backoff_steps")),
            honor_upstream_hints=bool(self.by_class("connection", "honor_upstream_hints")),
            cap_ms=(lockout.max_cooldown_ms or 1_800_000) if profiled else 120_000,
        )

    def provider_cooldown(self) -> ProviderCooldownProfile:
        auth = AuthClass.API_KEY if self._auth is AuthClass.NONE else self._auth
        shortest = self.get("provider_cooldown.min_ms")
        return ProviderCooldownProfile(
            enabled=self._sources.any_source_on("provider_cooldown.enabled"),
            failure_threshold=self.by_class("provider_cooldown", "failure_threshold", auth),
            failure_window_ms=self.by_class("provider_cooldown", "failure_window_ms", auth),
            cooldown_ms=self.by_class("provider_cooldown", "cooldown_ms", auth),
            min_ms=shortest,
            max_ms=max(shortest, self.get("provider_cooldown.max_ms")),
        )

    def lockout(self, watches_first_output: bool) -> LockoutProfile:
        base = math.ceil(self.get("model_lockout.base_cooldown_ms"))
        unprofiled = self._auth is AuthClass.NONE
        return LockoutProfile(
            pool_enabled=bool(self.get("model_lockout.enabled")),
            error_codes=frozenset(self.get("model_lockout.error_codes")),
            base_cooldown_ms=base,
            max_cooldown_ms=max(base, math.ceil(self.get("model_lockout.max_cooldown_ms"))),
            max_backoff_steps=int(self.get("model_lockout.max_backoff_steps")),
            use_exponential_backoff=bool(self.get("model_lockout.use_exponential_backoff")),
            reset_after_ms=1_800_000 if unprofiled else math.ceil(self.by_class("breaker", "reset_timeout_ms")),
            slow_first_output=SlowFirstOutput(
                enabled=watches_first_output and bool(self.get("model_lockout.slow_first_output.enabled")),
                threshold_ms=self.get("model_lockout.slow_first_output.threshold_ms"),
            ),
        )

    def terminal(self) -> TerminalProfile:
        return TerminalProfile(
            custom_ban_signals=tuple(self.get("terminal.custom_ban_signals")),
            auto_disable_banned=bool(self.get("terminal.auto_disable_banned")),
            auto_disable_scope=self.get("terminal.auto_disable_scope"),
            ambiguous_401_soft=bool(self.get("terminal.ambiguous_401_soft_lockout"))
            and self._provider.ambiguous_401_soft,
        )

    def hints(self) -> HintProfile:
        return HintProfile(
            bool(self.get("retry_hints.extended_texts")),
            bool(self.get("retry_hints.extended_reset_headers")),
        )

    def rotation(self) -> RotationProfile:
        return RotationProfile(
            enabled=bool(self.get("rotation.enabled")),
            on_status={s: bool(self.get(f"rotation.on_{s}")) for s in _ROTATION_STATUSES},
            threshold={s: self.get(f"rotation.threshold_{s}") for s in _ROTATION_STATUSES},
            window_ms=self.get("rotation.window_ms"),
            rate_limit_reset_ms=round(float(self.get("rotation.rate_limit_reset_seconds")) * 1000),
        )

    def queue(self) -> QueueProfile | None:
        own, declared = self._queue_block(self._own), self._queue_block(self._profile)
        auto_enable = bool(self.get("queue.auto_enable_api_key_providers"))
        if not is_paced(declared | own, self._auth, auto_enable=auto_enable, is_active=self._connection.enabled):
            return None
        configured = QueueProfile(**{name: self._configured(f"{_QUEUE}{name}") for name in _QUEUE_FIELDS})
        overrides = {theirs: own[ours] for theirs, ours in _QUEUE_OVERRIDES.items() if ours in own}
        return effective_profile(configured, overrides, self._provider.queue_wait_floor_ms)

    @staticmethod
    def _queue_block(settings: Mapping[str, object]) -> dict[str, object]:
        return {name.removeprefix(_QUEUE): value for name, value in settings.items() if name.startswith(_QUEUE)}

    def _configured(self, name: str) -> Any:
        """A queue setting apart from the numbers that the connection overrides: those have limits of their own."""
        own = None if name.removeprefix(_QUEUE) in _QUEUE_OVERRIDES.values() else self._own
        return self._sources.resolve(name, connection=own, catalogue=self._profile.get(name))

    def early_probe(self) -> EarlyProbeProfile:
        return EarlyProbeProfile(
            bool(self.get("early_probe.enabled")),
            self.get("early_probe.min_block_ms"),
            self.get("early_probe.interval_ms"),
            bool(self.get("early_probe.include_server_stated")),
        )


def effective_degradation(failure_threshold: int, explicit: int | None) -> int:
    """Degradation threshold in force (breaker.md section 3): derived ones are not clamped, explicit ones are."""
    if explicit is None:
        return math.ceil(0.6 * failure_threshold)
    return max(1, min(explicit, failure_threshold - 1))
