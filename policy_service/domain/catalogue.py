"""Catalogue data: providers, connections, routes, callers, rules (spec/provider_catalogue.md).

Frozen values only; parsing and validation of files live in `settings/`. Logic reads flags from here,
never provider names. A provider that is not listed takes the defaults of `Provider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policy_service.domain.ids import AuthClass, DurationMs
from policy_service.domain.profiles import KindThreshold


@dataclass(frozen=True, slots=True)
class RestatementRule:
    """Corrects a misleading HTTP status (spec/restatement_and_rules.md section 1)."""

    id: str
    from_statuses: frozenset[int]
    to_status: int
    text_markers: tuple[str, ...]
    exclude_markers: tuple[str, ...] = ()
    default_retry_after_ms: DurationMs | None = None


@dataclass(frozen=True, slots=True)
class HeaderCondition:
    """True when the header's value satisfies `equals`, or (`zero_pair`) any `name=0` pair of a comma list."""

    names: tuple[str, ...]
    equals: str | None = None
    zero_pair: bool = False


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """A provider rule of the catalogue (spec/restatement_and_rules.md section 2). First match wins."""

    id: str
    statuses: frozenset[int]
    reason: str
    scope: str
    """`model`, `connection` or `provider` (the last has no effect)."""
    body_any: tuple[str, ...] = ()
    body_all: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    """Structured codes or types that satisfy the rule even where texts are not visible."""
    headers: tuple[HeaderCondition, ...] = ()
    cooldown_ms: DurationMs | None = None
    cooldown_from_text: bool = False
    """Take the cooldown from "resets in N unit" in the text; no such text, no match."""
    pre_check: bool = False


@dataclass(frozen=True, slots=True)
class OperatorRule:
    """A rule declared by the operator (spec/restatement_and_rules.md section 3)."""

    provider: str
    status: int
    match: str
    scope: str
    reason: str = "quota_exhausted"
    cooldown_ms: DurationMs | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class Provider:
    """Everything known about one provider; each field is described in spec/provider_catalogue.md section 1."""

    id: str
    aliases: tuple[str, ...] = ()
    display_name: str = ""
    """For people; empty: the id."""
    auth_class: AuthClass = AuthClass.NONE
    no_auth: bool = False
    web_cookie: bool = False
    per_model_quota: bool = False
    passthrough: bool = False
    per_model_nonquota: bool = False
    quota_family: str | None = None
    family_pools: bool = False
    default_lock_scope: str | None = None
    model_lock_extra_statuses: frozenset[int] = frozenset()
    forbidden_is_model_scoped: bool = False
    full_text_rules: bool = False
    honors_rule_scope: bool = False
    egress_bucketed: bool = False
    shared_wallet_402: bool = False
    google_surface: bool = False
    cloud_code: bool = False
    route_error_texts: tuple[str, ...] = ()
    request_rejected_texts: tuple[str, ...] = ()
    extra_subscription_texts: tuple[str, ...] = ()
    wallet_texts: tuple[str, ...] = ()
    quota_metrics_host: str | None = None
    credits_text_is_terminal: bool = True
    """False: a credits text does not set credits_exhausted (the `*-compatible-*` patterns)."""
    ambiguous_401_soft: bool = False
    free_tier_billing: bool = False
    kind_hints_default: bool = True
    kind_thresholds: Mapping[str, KindThreshold] = field(default_factory=dict)
    """Failure kind -> when failures of this kind alone open the breaker."""
    code_meanings: Mapping[str, str] = field(default_factory=dict)
    """Structured error code of this provider, lower case -> what it means: `credits`, `banned`, `credential`,
    `period_quota`, `rate_limit`, `overloaded`, `content_policy` (numeric codes mean nothing without the provider)."""
    limits_per_model: bool = False
    hosts_models: bool = False
    """Rate limits are counted per model; says where the blame lies, keys of locks are not affected."""
    naive_times_offset: str = ""
    """UTC offset such as `+08:00` of times that the provider's texts write without a zone; empty: UTC."""
    queue_wait_floor_ms: DurationMs = 0
    """Least `queue.max_wait_ms` where the connection overrides none (spec/queue_admission.md section 1)."""
    start_slot_ms: DurationMs = 0
    """Static start slots (spec/queue_admission.md section 3, step 4): gap between starts of paced calls; 0: none."""
    queue_scope: str = ""
    """What the request queue is kept by beside the connection: `quota_scope`, `model_family`, `model` or nothing."""
    usage_wall: bool = False
    """Its OAuth subscriptions have a usage wall with a lower-priority lane and a weekly reset (spec/usage_wall.md)."""
    account_limit_texts: tuple[str, ...] = ()
    """Texts of a limit on the whole account, where other limits are per model."""
    restatement: tuple[RestatementRule, ...] = ()
    error_rules: tuple[ErrorRule, ...] = ()
    base_url: str = ""
    """Where Envoy finds the API: what stands before the path that a client asks for; empty: unknown."""
    profile: Mapping[str, object] = field(default_factory=dict)
    """Overrides of profile numbers, by setting name without the auth class: `breaker.failure_threshold`,
    `connection.base_cooldown_ms`."""

    @property
    def counts_per_model(self) -> bool:
        """Catalogue half of spec/model_lockout.md section 3 (the connection flag wins over it)."""
        return self.per_model_quota or self.passthrough


@dataclass(frozen=True, slots=True)
class Connection:
    """One declared account or key. Never holds a credential."""

    id: str
    provider: str
    auth_class: AuthClass | None = None
    """None: the class of the provider."""
    weight: float = 1.0
    priority: int = 0
    max_concurrent: int | None = None
    address: str = ""
    """host:port that Envoy dials; empty where the gateway knows it."""
    base_url: str = ""
    """Instead of the provider's; wins over `address`."""
    tags: tuple[str, ...] = ()
    label: str = ""
    """Name that the owner of a lease on it may see (spec/leases.md section 4)."""
    account_names: tuple[str, ...] = ()
    """E-mail and display names of the account; a label equal to one of them is hidden."""
    enabled: bool = True
    disable_cooling: bool = False
    passthrough_models: bool | None = None
    spare_keys: bool = False
    base_url_is_local: bool = False
    node_clock_zone: str | None = None
    node_clock_hour: int | None = None
    max_sessions: int | None = None
    """Session slots of an OAuth connection that takes part in the session spread (spec/affinity.md section 6)."""
    low_priority_mode: bool = False
    """Accept the lower-priority lane at the usage wall (spec/usage_wall.md section 1)."""
    auto_limit_reset: bool = False
    """Claim the weekly limit reset at the usage wall."""
    organization_uuid: str = ""
    """Organisation of the account, for the limit reset; empty where unknown."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Per-connection values of settings by full name; the highest precedence."""


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """One entry of a route. Without a connection any connection of the provider may serve."""

    key: str
    provider: str
    connection: str = ""
    model: str = ""
    weight: float = 1.0
    priority: int = 0
    fallback_only_on_quota: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A named list of targets with a strategy (spec/strategies.md)."""

    name: str
    strategy: str
    targets: tuple[RouteTarget, ...]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Caller:
    """An API key of the caller registry; only its SHA-256 (lower-case hex) is kept."""

    id: str
    key_sha256: str
    enabled: bool = True
    scopes: frozenset[str] = frozenset()
    allowed_connections: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """One whole revision of the catalogue."""

    providers: Mapping[str, Provider] = field(default_factory=dict)
    """By canonical id; pattern ids (`openai-compatible-*`, `*cloudcode*`) included."""
    connections: Mapping[str, Connection] = field(default_factory=dict)
    routes: Mapping[str, Route] = field(default_factory=dict)
    callers: Mapping[str, Caller] = field(default_factory=dict)
    operator_rules: tuple[OperatorRule, ...] = ()
    stored_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings written by the operator, by full dotted name."""
    provider_strategies: Mapping[str, str] = field(default_factory=dict)
    """Account strategy by canonical provider; else the setting `fallback_strategy` (spec/strategies.md section 1)."""


class ProviderDirectory:
    """Alias and pattern look-up over the providers of one catalogue; memoised, pure."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        self._exact = {p.id: p for p in providers.values() if "*" not in p.id}
        self._alias = {alias.lower(): p.id for p in self._exact.values() for alias in p.aliases}
        patterns = (p for p in providers.values() if "*" in p.id)
        self._patterns = sorted(patterns, key=lambda p: -len(p.id))
        self._memo: dict[str, Provider] = {}

    def canonical(self, name: str) -> str:
        """Lower case with aliases resolved; an unknown name is its own canonical id."""
        lowered = name.strip().lower()
        return self._alias.get(lowered, lowered)

    def get(self, name: str) -> Provider:
        """Entry for a name or alias; an exact id beats a pattern, a longer pattern a shorter one."""
        found = self._memo.get(name)
        if found is None:
            found = self._find(self.canonical(name))
            if len(self._memo) < 10_000:
                self._memo[name] = found
        return found

    def is_known(self, name: str) -> bool:
        """True if an entry (exact, alias or pattern) exists."""
        canonical = self.canonical(name)
        return canonical in self._exact or self._pattern(canonical) is not None

    def _find(self, canonical: str) -> Provider:
        exact = self._exact.get(canonical)
        return exact or self._pattern(canonical) or Provider(id=canonical)

    def _pattern(self, canonical: str) -> Provider | None:
        for provider in self._patterns:
            if _matches(provider.id, canonical):
                return provider
        return None


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("*") and pattern.endswith("*"):
        return pattern[1:-1] in name
    return pattern.endswith("*") and name.startswith(pattern[:-1])
