"""Every policy setting as data (spec/operator_surface.md section 3 and the file of each mechanism).

Importing this module fills `settings.REGISTRY`. A per-class block is written once and registered for each
auth class with that class's default.
"""

from __future__ import annotations

from policy_service.domain.settings import ENV_ALIASES, SettingSpec, register

CLASSES = ("oauth", "api_key", "local", "default")
_REST_CLASS = {"oauth": "oauth", "api_key": "apikey", "local": "local", "default": "default"}
DAY_MS = 86_400_000


def _per_class(
    block: str,
    field: str,
    kind: str,
    defaults: tuple[object, object, object, object],
    *,
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    doc: str = "",
    spec: str = "",
    rest: str = "",
    classes: tuple[str, ...] = CLASSES,
) -> None:
    for name, default in zip(CLASSES, defaults, strict=True):
        if name not in classes:
            continue
        rest_name = f"{rest.format(cls=_REST_CLASS[name])}" if rest and name in ("oauth", "api_key") else ""
        register(SettingSpec(f"{block}.{name}.{field}", kind, default, low, high, (), unit, doc, spec, rest_name))


# --- circuit breaker (breaker.md section 3) -------------------------------------------------------------
_B = "breaker.md section 3"
_per_class(
    "breaker",
    "failure_threshold",
    "int",
    (8, 12, 2, 5),
    low=1,
    high=1000,
    spec=_B,
    doc="Counted failures at which the breaker opens.",
    rest="providerBreaker.{cls}.failureThreshold",
)
_per_class(
    "breaker",
    "degradation_threshold",
    "int",
    (5, 7, None, None),
    low=1,
    high=1000,
    spec=_B,
    doc="Counted failures at which the breaker is DEGRADED; unset: ceil(0.6 x failure_threshold).",
    rest="providerBreaker.{cls}.degradationThreshold",
)
_per_class(
    "breaker",
    "reset_timeout_ms",
    "int",
    (60_000, 30_000, 15_000, 30_000),
    low=1_000,
    high=DAY_MS,
    unit="ms",
    spec=_B,
    doc="OPEN time of the first cycles, and life of a probe permit.",
    rest="providerBreaker.{cls}.resetTimeoutMs",
)
_per_class(
    "breaker",
    "max_backoff_multiplier",
    "int",
    (8, 4, 16, 16),
    low=1,
    high=1_000,
    spec=_B,
    doc="Cap of the OPEN time as a multiple of the base.",
)
_per_class(
    "breaker",
    "backoff_escalation_cycles",
    "int",
    (2, 3, 3, 3),
    low=0,
    high=1_000,
    spec=_B,
    doc="Failed HALF_OPEN rounds before the OPEN time doubles.",
)
register(
    SettingSpec("breaker.half_open_probes", "int", 1, 1, 100, doc="Probe permits at a time over the fleet.", spec=_B),
    SettingSpec("breaker.successes_to_close", "int", 1, 1, 100, doc="Alive verdicts that close a breaker.", spec=_B),
    SettingSpec(
        "breaker.count_mode",
        "choice",
        "net",
        choices=("net", "consecutive"),
        spec=_B,
        doc="net: a success subtracts one; consecutive: a success sets the count to 0.",
    ),
    SettingSpec(
        "breaker.kind_hints",
        "bool",
        None,
        spec=_B,
        rest="connectionCooldown.useUpstream429BreakerHints",
        doc="OPEN time by failure kind; unset: the catalogue's kind_hints_default.",
    ),
    SettingSpec(
        "breaker.per_connection",
        "bool",
        False,
        doc="A breaker per connection beside the provider's.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.reopen_jitter",
        "float",
        0,
        0,
        1,
        doc="Share of the OPEN time that is added at random.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.quorum.enabled",
        "bool",
        False,
        doc="Open only on evidence of several reporters.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.quorum.min_replicas",
        "int",
        2,
        1,
        1000,
        doc="Replicas that make a quorum.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.quorum.min_connections",
        "int",
        2,
        1,
        1000,
        doc="Connections that make a quorum.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.slow_start.enabled", "bool", False, doc="Ramp traffic up after a close.", spec="breaker.md section 12"
    ),
    SettingSpec(
        "breaker.slow_start.duration_ms",
        "int",
        30_000,
        1,
        DAY_MS,
        unit="ms",
        doc="Length of the ramp.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.slow_start.min_share",
        "float",
        0.10,
        0,
        1,
        doc="Share admitted at the start of the ramp.",
        spec="breaker.md section 12",
    ),
    SettingSpec(
        "breaker.slow_start.aggression", "float", 1.0, 0.01, 100, doc="Shape of the ramp.", spec="breaker.md section 12"
    ),
    SettingSpec(
        "breaker.slow_start.failure_budget",
        "int",
        2,
        1,
        1000,
        doc="Counted failures in the ramp that reopen.",
        spec="breaker.md section 12",
    ),
)

# --- connection cooldown (connection_cooldown.md section 2) ----------------------------------------------
_C = "connection_cooldown.md section 2"
_per_class(
    "connection",
    "base_cooldown_ms",
    "int",
    (5_000, 3_000, 5_000, 5_000),
    low=0,
    high=DAY_MS,
    unit="ms",
    spec=_C,
    doc="First step of the ladder.",
    rest="connectionCooldown.{cls}.baseCooldownMs",
)
_per_class(
    "connection",
    "max_backoff_steps",
    "int",
    (8, 5, 15, 15),
    low=0,
    high=32,
    spec=_C,
    doc="Highest step of the ladder.",
    rest="connectionCooldown.{cls}.maxBackoffSteps",
)
_per_class(
    "connection",
    "honor_upstream_hints",
    "bool",
    (False, True, False, False),
    spec=_C,
    doc="A wait stated by the upstream replaces the ladder.",
)
register(
    SettingSpec(
        "connection.health_check_can_disable",
        "bool",
        False,
        spec="connection_cooldown.md section 4",
        doc="A failed health check may cool or end the connection.",
    ),
)

# --- provider cooldown (provider_cooldown.md) ------------------------------------------------------------
_P = "provider_cooldown.md"
_per_class(
    "provider_cooldown",
    "failure_threshold",
    "int",
    (10, 15, 2, 15),
    low=1,
    high=100_000,
    spec=_P,
    doc="Failures within the window that cool the provider.",
    classes=("oauth", "api_key", "local"),
)
_per_class(
    "provider_cooldown",
    "failure_window_ms",
    "int",
    (900_000, 1_800_000, 300_000, 1_800_000),
    low=0,
    high=DAY_MS,
    unit="ms",
    spec=_P,
    doc="Sliding window.",
    classes=("oauth", "api_key", "local"),
)
_per_class(
    "provider_cooldown",
    "cooldown_ms",
    "int",
    (300_000, 600_000, 60_000, 600_000),
    low=0,
    high=DAY_MS,
    unit="ms",
    spec=_P,
    doc="How long the provider then cools.",
    classes=("oauth", "api_key", "local"),
)
register(
    SettingSpec(
        "provider_cooldown.enabled",
        "bool",
        False,
        spec=_P,
        rest="providerCooldown.enabled",
        doc="Cross-request memory of failing providers; on when the setting or the environment says so.",
    ),
    SettingSpec(
        "provider_cooldown.min_ms",
        "int",
        5_000,
        0,
        3_600_000,
        unit="ms",
        spec=_P,
        rest="providerCooldown.minRetryCooldownMs",
        doc="First step for a connection.",
    ),
    SettingSpec(
        "provider_cooldown.max_ms",
        "int",
        300_000,
        0,
        DAY_MS,
        unit="ms",
        spec=_P,
        rest="providerCooldown.maxRetryCooldownMs",
        doc="Longest step; read as at least min_ms.",
    ),
)
ENV_ALIASES["provider_cooldown.enabled"] = "PROVIDER_COOLDOWN_ENABLED"
for _cls in ("oauth", "api_key"):
    for _field in ("failure_threshold", "failure_window_ms", "cooldown_ms"):
        ENV_ALIASES[f"provider_cooldown.{_cls}.{_field}"] = f"OMNIROUTE_PROVIDER_BREAKER_{_cls}_{_field}".upper()

# --- model lockout (model_lockout.md section 5) ----------------------------------------------------------
_L = "model_lockout.md section 5"
register(
    SettingSpec("model_lockout.enabled", "bool", False, spec=_L, rest="modelLockout.enabled", doc="Pool lockout."),
    SettingSpec(
        "model_lockout.error_codes",
        "int_list",
        (403, 404, 429, 502, 503, 504),
        100,
        599,
        spec=_L,
        rest="modelLockout.errorCodes",
        doc="Statuses of pool attempts that lock the model.",
    ),
    SettingSpec(
        "model_lockout.base_cooldown_ms",
        "int",
        120_000,
        5_000,
        600_000,
        unit="ms",
        spec=_L,
        rest="modelLockout.baseCooldownMs",
        doc="First step of the pool lockout.",
    ),
    SettingSpec(
        "model_lockout.max_cooldown_ms",
        "int",
        1_800_000,
        5_000,
        3_600_000,
        unit="ms",
        spec=_L,
        rest="modelLockout.maxCooldownMs",
        doc="Cap of ladder cooldowns and locks; read as at least the base.",
    ),
    SettingSpec(
        "model_lockout.max_backoff_steps",
        "int",
        10,
        0,
        20,
        spec=_L,
        rest="modelLockout.maxBackoffSteps",
        doc="Highest step of the lock ladder.",
    ),
    SettingSpec(
        "model_lockout.use_exponential_backoff",
        "bool",
        True,
        spec=_L,
        rest="modelLockout.useExponentialBackoff",
        doc="False: every lock lasts the base.",
    ),
    SettingSpec("model_lockout.slow_first_output.enabled", "bool", False, spec=_L, doc="Lock models that start late."),
    SettingSpec(
        "model_lockout.slow_first_output.providers", "text_list", ("nvidia",), spec=_L, doc="Providers watched."
    ),
    SettingSpec(
        "model_lockout.slow_first_output.threshold_ms",
        "int",
        120_000,
        1_000,
        3_600_000,
        unit="ms",
        spec=_L,
        doc="First useful output later than this is one event.",
    ),
)

# --- terminal states, hints, rotation, egress ------------------------------------------------------------
_T = "terminal_states.md"
register(
    SettingSpec(
        "terminal.custom_ban_signals", "text_list", (), spec=_T, doc="Further ban texts, each at most 200 characters."
    ),
    SettingSpec("terminal.auto_disable_banned", "bool", False, spec=_T, doc="A ban also switches the connection off."),
    SettingSpec(
        "terminal.auto_disable_scope",
        "choice",
        "all",
        choices=("all", "subscription"),
        spec=_T,
        doc="Which connections auto_disable_banned concerns.",
    ),
    SettingSpec("terminal.ambiguous_401_soft_lockout", "bool", False, spec=_T, doc="Soft strikes for ambiguous 401s."),
    SettingSpec(
        "retry_hints.extended_texts",
        "bool",
        True,
        spec="retry_hints.md section 4.1",
        rest="retryHintsExtendedTexts",
        doc="Read waiting phrases beyond the reference's.",
    ),
    SettingSpec(
        "retry_hints.extended_reset_headers",
        "bool",
        True,
        spec="retry_hints.md section 1",
        rest="retryHintsExtendedResetHeaders",
        doc="Read reset headers where Retry-After is absent.",
    ),
    SettingSpec(
        "daily_reset_zone",
        "text",
        None,
        spec="classification.md section 7",
        doc="IANA zone of daily quotas; unset: the zone of the host. Set it in a fleet.",
    ),
    SettingSpec("rotation.enabled", "bool", False, spec="classification.md section 6", doc="Rotation gate."),
    *(
        SettingSpec(f"rotation.on_{s}", "bool", True, spec="classification.md section 6", doc=f"Fail over on {s}.")
        for s in (429, 500, 502, 400)
    ),
    *(
        SettingSpec(
            f"rotation.threshold_{s}",
            "int",
            1,
            1,
            1000,
            spec="classification.md section 6",
            doc=f"Failures with {s} within the window before failing over.",
        )
        for s in (429, 500, 502, 400)
    ),
    SettingSpec(
        "rotation.window_ms",
        "int",
        120_000,
        0,
        DAY_MS,
        unit="ms",
        spec="classification.md section 6",
        doc="Window of the gate.",
    ),
    SettingSpec(
        "rotation.rate_limit_reset_seconds",
        "float",
        0,
        0,
        86_400,
        unit="s",
        spec="connection_cooldown.md section 3",
        doc="Fixed wait of rate limits; 0: off.",
    ),
    SettingSpec(
        "egress_lock.providers",
        "text",
        None,
        spec="egress_lock.md section 2",
        doc="Comma list that replaces the default set; none, off, false or 0: empty.",
    ),
)

# --- pool guard, early probe (guards.md sections 6 and 7) --------------------------------------------------
register(
    SettingSpec(
        "pool_guard.enabled",
        "bool",
        False,
        spec="guards.md section 6",
        doc="Keep soft exclusions from emptying a pool.",
    ),
    SettingSpec(
        "pool_guard.max_excluded_share",
        "float",
        0.5,
        0,
        1,
        spec="guards.md section 6",
        doc="Share that may be excluded at one time.",
    ),
    SettingSpec(
        "pool_guard.panic_max_in_flight",
        "int",
        1,
        0,
        1000,
        spec="guards.md section 6",
        doc="Panic calls per pool in the fleet.",
    ),
    SettingSpec(
        "early_probe.enabled", "bool", False, spec="guards.md section 7", doc="Test long blocks before their end."
    ),
    SettingSpec(
        "early_probe.min_block_ms",
        "int",
        600_000,
        0,
        30 * DAY_MS,
        unit="ms",
        spec="guards.md section 7",
        doc="Shortest block that is tested.",
    ),
    SettingSpec(
        "early_probe.interval_ms",
        "int",
        300_000,
        1_000,
        30 * DAY_MS,
        unit="ms",
        spec="guards.md section 7",
        doc="One permit per this time and key.",
    ),
    SettingSpec(
        "early_probe.include_server_stated",
        "bool",
        False,
        spec="guards.md section 7",
        doc="Test deadlines stated by the server too.",
    ),
)

# --- waiting, affinity, leases, concurrency (their own files) ---------------------------------------------
register(
    SettingSpec(
        "cooldown_wait.enabled",
        "bool",
        True,
        spec="cooldown_wait.md",
        rest="comboCooldownWait.enabled",
        doc="Wait out short cooldowns of a route.",
    ),
    SettingSpec(
        "cooldown_wait.max_wait_ms",
        "int",
        90_000,
        0,
        300_000,
        unit="ms",
        spec="cooldown_wait.md",
        rest="comboCooldownWait.maxWaitMs",
        doc="Longest single wait.",
    ),
    SettingSpec(
        "cooldown_wait.max_attempts",
        "int",
        5,
        0,
        10,
        spec="cooldown_wait.md",
        rest="comboCooldownWait.maxAttempts",
        doc="Waits a request.",
    ),
    SettingSpec(
        "cooldown_wait.budget_ms",
        "int",
        300_000,
        0,
        300_000,
        unit="ms",
        spec="cooldown_wait.md",
        rest="comboCooldownWait.budgetMs",
        doc="Waiting time a request.",
    ),
    SettingSpec(
        "direct_wait.enabled",
        "bool",
        True,
        spec="cooldown_wait.md section 4",
        rest="waitForCooldown.enabled",
        doc="The same without a route.",
    ),
    SettingSpec(
        "direct_wait.max_retries",
        "int",
        5,
        0,
        10,
        spec="cooldown_wait.md section 4",
        rest="waitForCooldown.maxRetries",
        doc="Waits a request.",
    ),
    SettingSpec(
        "direct_wait.max_retry_wait_s",
        "int",
        90,
        0,
        300,
        unit="s",
        spec="cooldown_wait.md section 4",
        rest="waitForCooldown.maxRetryWaitSec",
        doc="Longest single wait.",
    ),
    SettingSpec(
        "direct_wait.budget_ms",
        "int",
        300_000,
        0,
        300_000,
        unit="ms",
        spec="cooldown_wait.md section 4",
        rest="waitForCooldown.budgetMs",
        doc="Waiting time a request.",
    ),
    SettingSpec(
        "concurrency.quota_share.enabled",
        "bool",
        True,
        spec="concurrency.md section 4.2",
        rest="quotaShareConcurrencyLimit.enabled",
        doc="Permits for quota-share routes.",
    ),
    SettingSpec(
        "concurrency.quota_share.on_saturation",
        "choice",
        "proceed",
        choices=("proceed", "reject"),
        spec="concurrency.md section 4.2",
        rest="quotaShareConcurrencyLimit.onSaturation",
        doc="What a full gate means.",
    ),
    SettingSpec(
        "concurrency.permit_ttl_ms",
        "int",
        120_000,
        1_000,
        1_800_000,
        unit="ms",
        spec="concurrency.md section 2.1",
        rest="quotaShareConcurrencyLimit.permitTtlMs",
        doc="Life of a permit without renewal.",
    ),
    SettingSpec(
        "lease.lock_delay_ms",
        "int",
        0,
        0,
        600_000,
        unit="ms",
        spec="leases.md section 5",
        rest="sessionLease.lockDelayMs",
        doc="Pause of a connection after a lapsed lease.",
    ),
    SettingSpec(
        "affinity.ttl_ms",
        "int",
        0,
        0,
        30 * DAY_MS,
        unit="ms",
        spec="affinity.md section 2",
        rest="sessionAffinityTtlMs",
        doc="Life of a session pin; 0: off.",
    ),
    SettingSpec(
        "affinity.on_ineligible",
        "choice",
        "detour",
        choices=("detour", "repin"),
        spec="affinity.md section 4",
        rest="sessionAffinityOnIneligible",
        doc="What a temporarily ineligible pin means.",
    ),
    SettingSpec(
        "affinity.require_caller",
        "bool",
        False,
        spec="affinity.md section 3",
        rest="affinityRequireCaller",
        doc="No pins for anonymous requests.",
    ),
    SettingSpec(
        "affinity.disable_route_stickiness",
        "bool",
        False,
        spec="affinity.md section 8",
        rest="disableSessionStickiness",
        doc="Switch route stickiness off.",
    ),
    SettingSpec(
        "usage_wall.not_offered_memo_ms",
        "int",
        604_800_000,
        60_000,
        691_200_000,
        unit="ms",
        spec="usage_wall.md section 8.3",
        rest="usageWall.notOfferedMemoMs",
        doc="Memory of a reset that was not offered.",
    ),
)
