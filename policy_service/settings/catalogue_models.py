"""How a catalogue file looks: one strict model per kind of entry. Checks between entries: `catalogue_checks`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

from policy_service.domain.catalogue import Caller, Connection, OperatorRule, Route, RouteTarget
from policy_service.domain.ids import AuthClass
from policy_service.domain.setting_specs import ACCOUNT_STRATEGIES
from policy_service.domain.strategies import DEFAULT_STRATEGY, ROUTE_STRATEGIES
from policy_service.settings.provider_data import BaseUrl, ProviderEntry
from policy_service.settings.server import split_address
from policy_service.settings.values import bad_zone


def printable(text: str) -> str:
    """The text; gateways cannot send any other, and a decision token separates its parts by a control character."""
    if not text.isprintable():
        raise ValueError("contains control characters")
    return text


Id = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f\x7f]+$"), AfterValidator(printable)]
Name = Annotated[str, AfterValidator(printable)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Ms = Annotated[int, Field(ge=0, le=86_400_000)]
Factor = Literal[
    "quota",
    "health",
    "costInv",
    "latencyInv",
    "taskFit",
    "stability",
    "tierPriority",
    "tierAffinity",
    "specificityMatch",
    "contextAffinity",
    "sessionAvailability",
    "connectionDensity",
    "cacheAffinity",
    "resetWindowAffinity",
    "quality",
    "reliability",
]
FACTORS: tuple[str, ...] = get_args(Factor)
"""Factors of the `auto` score (spec/strategies.md section 7)."""
Pack = Literal["ship-fast", "cost-saver", "quality-first", "offline-friendly", "reliability-first", "chaos-mode"]
Router = Literal["rules", "score", "cost", "eco", "latency", "fast", "sla", "sla-aware", "lkgp"]


class Strict(BaseModel):
    """No unknown keys, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _zone(value: str | None) -> str | None:
    for reason in bad_zone(value) if value is not None else ():
        raise ValueError(f"{reason}; write a name of the IANA data base")
    return value


def _dial(value: str) -> str:
    if value:
        split_address(value)
    return value


class ConnectionEntry(Strict):
    """One account or key of a provider. Never holds a credential."""

    id: Id = Field(description="Name of the connection, unique in the file.")
    provider: Id = Field(description="Provider id or alias.")
    auth_class: Literal["oauth", "api_key", "local", "default"] | None = Field(
        default=None, description="Class of credential; unset: that of the provider."
    )
    weight: Weight = Field(default=1.0, description="Share where a route weighs accounts.")
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, description="Lower goes first.")
    max_concurrent: float | None = Field(
        default=None, description="Requests at a time over the fleet; unset, 0 or less: no limit; fractions are cut."
    )
    address: Annotated[str, AfterValidator(_dial)] = Field(
        default="", description="host:port that Envoy dials; TLS on port 443 only."
    )
    base_url: BaseUrl = Field(default="", description="URL that Envoy dials instead of `address` and the provider's.")
    tags: list[Id] = Field(default=[], description="Words for filters.")
    label: str = Field(default="", max_length=256, description="Name that the owner of a lease on it may see.")
    account_names: list[str] = Field(
        default=[],
        max_length=16,
        description="E-mail and display names of the account; a label equal to one is hidden.",
    )
    enabled: bool = Field(default=True, description="False: never selected.")
    disable_cooling: bool = Field(default=False, description="Failures never cool this connection.")
    passthrough_models: bool | None = Field(
        default=None, description="Quota counts per model on this connection; unset: as the provider says."
    )
    spare_keys: bool = Field(default=False, description="The connection has further keys to fall back to.")
    base_url_is_local: bool = Field(default=False, description="Its upstream is on the local network.")
    node_clock_zone: Annotated[str | None, AfterValidator(_zone)] = Field(
        default=None, description="IANA zone in which its daily quota is counted."
    )
    node_clock_hour: int | None = Field(default=None, ge=0, le=23, description="Hour at which its daily quota returns.")
    max_sessions: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Session slots of an OAuth account; new sessions are spread by them.",
    )
    low_priority_mode: bool = Field(
        default=False,
        validation_alias=AliasChoices("low_priority_mode", "lowPriorityMode"),
        description="Accept the lower-priority lane at the usage wall (Claude subscriptions).",
    )
    auto_limit_reset: bool = Field(
        default=False,
        validation_alias=AliasChoices("auto_limit_reset", "autoLimitReset"),
        description="Claim the weekly limit reset at the usage wall (Claude subscriptions).",
    )
    organization_uuid: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_-]{0,64}$",
        validation_alias=AliasChoices("organization_uuid", "organizationUUID"),
        description="Organisation of the account, for the limit reset; empty: the gateway looks it up.",
    )
    settings: dict[str, Any] = Field(
        default={}, description="Policy settings for this connection alone, by name; the highest precedence."
    )

    def to_domain(self, provider: str, settings: dict[str, object]) -> Connection:
        """The connection as logic reads it; `provider` is the canonical id."""
        plain = self.model_dump(
            exclude={"provider", "auth_class", "max_concurrent", "tags", "account_names", "settings"}
        )
        return Connection(
            **plain,
            provider=provider,
            auth_class=AuthClass(self.auth_class) if self.auth_class else None,
            max_concurrent=whole_cap(self.max_concurrent),
            tags=tuple(self.tags),
            account_names=tuple(self.account_names),
            settings=settings,
        )


def whole_cap(value: float | None) -> int | None:
    """A cap as spec/concurrency.md section 1 reads it: truncated; None where it means no limit."""
    if value is None or not math.isfinite(value) or value <= 0:
        return None
    return int(value) or None


class TargetEntry(Strict):
    """One entry of a route."""

    key: Name = Field(default="", max_length=256, description="Name in answers; empty: provider/connection/model.")
    provider: Name = Field(default="", max_length=200, description="Provider id or alias; empty: the connection's.")
    connection: Name = Field(default="", max_length=200, description="Connection id; empty: any of the provider's.")
    model: Name = Field(default="", max_length=256, description="Model id as sent upstream.")
    weight: Weight = Field(default=1.0, description="Share (weighted, quota-share).")
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, description="Lower goes first (priority).")
    fallback_only_on_quota: bool = Field(
        default=False, description="Only a quota failure of this target goes on to the next one (priority)."
    )

    def to_domain(self, provider: str) -> RouteTarget:
        """The target as logic reads it; `provider` is the canonical id."""
        key = self.key or "/".join(part for part in (provider, self.connection, self.model) if part)
        return RouteTarget(
            key, provider, self.connection, self.model, self.weight, self.priority, self.fallback_only_on_quota
        )


class RouteOptions(Strict):
    """Options of a route; unset ones take the defaults of the mechanism."""

    timeout_ms: Ms | None = Field(default=None, ge=1, description="Longest time of a whole request; 600000.")
    target_timeout_ms: Ms | None = Field(
        default=None, ge=1, description="Longest time of one attempt; at least cooldown_wait.budget_ms + 10000."
    )
    queue_timeout_ms: int | None = Field(default=None, ge=0, le=600_000, description="Longest wait in line; 30000.")
    queue_depth: int | None = Field(default=None, ge=0, le=100_000, description="Waiting at once; 20; 0: unlimited.")
    concurrency: int | None = Field(
        default=None, ge=1, le=100_000, description="Cap of each target without a cap of its own (round-robin)."
    )
    max_retries: int | None = Field(default=None, ge=0, le=30, description="Retries of one target; 1.")
    retry_delay_ms: Ms | None = Field(default=None, description="Pause before such a retry; 2000.")
    fallback_delay_ms: Ms | None = Field(default=None, description="Pause before the next target; 0.")
    max_set_retries: int | None = Field(default=None, ge=0, le=30, description="Further rounds over all targets; 0.")
    set_retry_delay_ms: Ms | None = Field(default=None, description="Pause before such a round; 2000.")
    hedging: bool | None = Field(default=None, description="A second target may be tried in parallel; false.")
    hedge_delay_ms: Ms | None = Field(default=None, description="Head start of the first one; 500.")
    nesting_depth: int | None = Field(default=None, ge=1, le=10, description="Depth of routes within routes; 3.")
    sticky_weighted_limit: int | None = Field(
        default=None, ge=0, le=1_000_000, description="Successes that repeat the drawn target (weighted); 1: off."
    )
    sticky_round_robin_limit: int | None = Field(
        default=None, ge=0, le=1_000_000, description="Requests that stay with a target (round-robin); 3; 0, 1: rotate."
    )
    disable_session_stickiness: bool | None = Field(default=None, description="No stickiness of sessions here.")
    prompt_cache_order: bool | None = Field(default=None, description="Order equal targets for prompt caches; true.")
    use_eval_scores: bool | None = Field(default=None, description="Order by evaluation scores of the request; false.")
    compat_filter_fail_open: bool | None = Field(
        default=None, description="Missing capabilities do not exclude; false."
    )
    reset_windows: list[Literal["session", "weekly", "monthly"]] | None = Field(
        default=None, description="Windows whose reset counts (reset-aware, reset-window); weekly."
    )
    weights: dict[Factor, Weight] | None = Field(default=None, description="Weights of the factors (auto).")
    pack: Pack | None = Field(default=None, description="Named set of weights (auto).")
    variant: Literal["default", "smart", "fast", "cheap", "coding"] | None = Field(
        default=None, description="Shares of the tiers in the draw (auto)."
    )
    router: Router | None = Field(default=None, description="How the choice is made (auto); rules.")
    budget: float | None = Field(default=None, ge=0, allow_inf_nan=False, description="Cost cap of a request in USD.")
    budget_fallback: Literal["cheapest", "strict"] | None = Field(
        default=None, description="When nothing fits the cap."
    )
    panel: list[str] | None = Field(default=None, min_length=1, description="Keys of the targets asked (fusion).")
    judge: str | None = Field(default=None, min_length=1, description="Key of the target that judges (fusion).")
    min_panel: int | None = Field(default=None, ge=1, le=30, description="Answers that are enough (fusion); 2.")
    grace_ms: Ms | None = Field(default=None, description="Wait for further answers (fusion); 8000.")
    hard_ms: Ms | None = Field(default=None, description="Longest wait for the panel (fusion); 90000.")
    stages: list[str] | None = Field(default=None, min_length=1, description="Keys of the stages (pipeline).")
    mode: Literal["sequence", "planner-executor"] | None = Field(default=None, description="Kind of pipeline.")
    tool_rounds: int | None = Field(default=None, ge=1, le=32, description="Tool rounds (planner-executor); 8.")


class RouteEntry(Strict):
    """A named list of targets with a strategy."""

    name: Id = Field(description="Name by which gateways ask for the route.")
    strategy: str = Field(
        default=DEFAULT_STRATEGY,
        description="How targets are ordered; empty: priority. quota-share only for routes named qtSd/...",
        json_schema_extra={"enum": [*ROUTE_STRATEGIES, "quota-share", ""]},
    )
    targets: list[TargetEntry] = Field(min_length=1, description="Targets in configured order.")
    options: RouteOptions = Field(default=RouteOptions(), description="Options of the route and its strategy.")

    def to_domain(self, targets: tuple[RouteTarget, ...]) -> Route:
        """The route as logic reads it."""
        return Route(self.name, self.strategy or DEFAULT_STRATEGY, targets, self.options.model_dump(exclude_none=True))


class CallerEntry(Strict):
    """One API key of the caller registry; only its hash is kept."""

    id: Id = Field(description="API key id.")
    key_sha256: str = Field(
        pattern=r"^(sha256:)?[0-9a-fA-F]{64}$",
        description="SHA-256 of the key, 64 hex digits: printf %s KEY | sha256sum",
    )
    enabled: bool = Field(default=True, description="False: the key is refused.")
    scopes: list[Id] = Field(default=[], description="lease:exclusive lets the key hold connections for itself.")
    allowed_connections: list[Id] = Field(default=[], description="Connections the key may use; empty: all unmanaged.")

    @property
    def digest(self) -> str:
        """The hash in the form that is compared."""
        return self.key_sha256.lower().removeprefix("sha256:")

    def to_domain(self) -> Caller:
        """The caller as logic reads it."""
        return Caller(self.id, self.digest, self.enabled, frozenset(self.scopes), tuple(self.allowed_connections))


class RuleEntry(Strict):
    """An operator rule: what an error of a provider means (spec/restatement_and_rules.md section 3)."""

    id: str = Field(
        default="", max_length=200, description="Name in verdicts; empty: operator-rule-<place in the list>."
    )
    provider: Id = Field(description="Provider id or alias.")
    status: int = Field(description="HTTP status, 100 .. 599.")
    match: str = Field(max_length=4_096, description="Plain text that the error contains, ignoring case.")
    scope: Literal["model", "connection", "provider"] = Field(description="What the error concerns.")
    reason: Literal[
        "quota_exhausted", "rate_limit_exceeded", "model_capacity", "server_error", "auth_error", "unknown"
    ] = Field(default="quota_exhausted", description="What the error means.")
    cooldown_ms: int | None = Field(default=None, ge=0, le=2_592_000_000, description="How long; unset: as usual.")

    def to_domain(self, provider: str, place_id: str) -> OperatorRule:
        """The rule as logic reads it; `provider` is the canonical id, `place_id` its name where it has none."""
        name = self.id or place_id
        return OperatorRule(provider, self.status, self.match, self.scope, self.reason, self.cooldown_ms, name)


class ProviderStrategyEntry(Strict):
    """How a connection of one provider is picked where a target names none."""

    fallback_strategy: str = Field(
        description="Account strategy.", json_schema_extra={"enum": list(ACCOUNT_STRATEGIES)}
    )


class CatalogueEntry(Strict):
    """A whole catalogue file. Entries of `providers` are laid over the built-in ones field by field."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    providers: list[ProviderEntry] = Field(default=[], description="Providers, new or changed.")
    connections: list[ConnectionEntry] = Field(default=[], description="Accounts and keys.")
    routes: list[RouteEntry] = Field(default=[], description="Named lists of targets.")
    callers: list[CallerEntry] = Field(default=[], description="API keys of the service's own clients.")
    rules: list[RuleEntry] = Field(default=[], description="Operator rules, at most 50; they go before built-in ones.")
    provider_strategies: dict[str, ProviderStrategyEntry] = Field(
        default={}, description="Account strategy by provider; else the setting fallback_strategy."
    )
    settings: dict[str, Any] = Field(default={}, description="Policy settings, nested or by dotted name.")


def catalogue_schema() -> dict[str, Any]:
    """JSON schema of a catalogue file."""
    schema = CatalogueEntry.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "policy-service catalogue"
    return schema
