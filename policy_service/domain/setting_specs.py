"""Every policy setting as data (spec/operator_surface.md section 3 and the file of each mechanism).

Importing this module fills `settings.REGISTRY`. One row a setting: name | type and range | default | REST name |
meaning. `{class}` stands for each auth class, with that class's default at the same place of the list; a class
whose default is `.` has no such setting. `-` is unset. A line `## ...` names the spec of the rows below it.
The unit of a number follows from the end of its name.
"""

from __future__ import annotations

from collections.abc import Iterator

from policy_service.domain.settings import ENV_ALIASES, STORED_FALLBACKS, SettingSpec, register

CLASSES = ("oauth", "api_key", "local", "default")
_REST_CLASS = {"oauth": "oauth", "api_key": "apikey"}
_UNITS = {"_ms": "ms", "_s": "s", "_seconds": "s", "_percent": "%", "_min": "min"}
ACCOUNT_STRATEGIES = (
    "fill-first",
    "round-robin",
    "p2c",
    "random",
    "least-used",
    "expiry-first",
    "cost-optimized",
    "strict-random",
)
"""Ways to pick a connection inside one provider, in the order of spec/strategies.md section 1."""

_TABLE = """
## breaker.md section 3
breaker.{class}.failure_threshold | int 1..1000 | 8 12 2 5 | providerBreaker.{class}.failureThreshold | Counted failures at which the breaker opens.
breaker.{class}.degradation_threshold | int 1..1000 | 5 7 - - | providerBreaker.{class}.degradationThreshold | Counted failures at which the breaker is DEGRADED; unset: ceil(0.6 x failure_threshold). Read as at most failure_threshold - 1, at least 1.
breaker.{class}.reset_timeout_ms | int 1_000..86_400_000 | 60_000 30_000 15_000 30_000 | providerBreaker.{class}.resetTimeoutMs | OPEN time of the first cycles, and life of a probe permit.
breaker.{class}.max_backoff_multiplier | int 1..1000 | 8 4 16 16 | | Cap of the OPEN time as a multiple of the base.
breaker.{class}.backoff_escalation_cycles | int 0..1000 | 2 3 3 3 | | Failed HALF_OPEN rounds before the OPEN time doubles.
breaker.half_open_probes | int 1..100 | 1 | | Probe permits at a time over the fleet.
breaker.successes_to_close | int 1..100 | 1 | | Alive verdicts that close a breaker.
breaker.count_mode | choice net/consecutive | net | | net: a success subtracts one; consecutive: a success sets the count to 0.
breaker.kind_hints | bool | - | connectionCooldown.useUpstream429BreakerHints | OPEN time by failure kind; unset: the catalogue's kind_hints_default.
## breaker.md section 12
breaker.per_connection | bool | false | | A breaker per connection beside the provider's.
breaker.reopen_jitter | float 0..1 | 0 | | Share of the OPEN time that is added at random.
breaker.quorum.enabled | bool | false | | Open only on evidence of several reporters.
breaker.quorum.min_replicas | int 1..1000 | 2 | | Replicas that make a quorum.
breaker.quorum.min_connections | int 1..1000 | 2 | | Connections that make a quorum.
breaker.slow_start.enabled | bool | false | | Ramp traffic up after a close.
breaker.slow_start.duration_ms | int 1..86_400_000 | 30_000 | | Length of the ramp.
breaker.slow_start.min_share | float 0..1 | 0.10 | | Share admitted at the start of the ramp.
breaker.slow_start.aggression | float 0.01..100 | 1.0 | | Shape of the ramp.
breaker.slow_start.failure_budget | int 1..1000 | 2 | | Counted failures in the ramp that reopen.
## connection_cooldown.md section 2
connection.{class}.base_cooldown_ms | int 0..86_400_000 | 5_000 3_000 5_000 5_000 | connectionCooldown.{class}.baseCooldownMs | First step of the ladder.
connection.{class}.max_backoff_steps | int 0..32 | 8 5 15 15 | connectionCooldown.{class}.maxBackoffSteps | Highest step of the ladder.
connection.{class}.honor_upstream_hints | bool | false true false false | | A wait stated by the upstream replaces the ladder.
## connection_cooldown.md section 4
connection.health_check_can_disable | bool | false | | A failed health check may cool or end the connection.
## operator_surface.md section 3
token_refresh_breaker.failure_threshold | int 1..100 | 5 | tokenRefreshBreaker.failureThreshold | Failed token refreshes at which further ones are put off.
token_refresh_breaker.reset_timeout_ms | int 60_000..86_400_000 | 1_800_000 | tokenRefreshBreaker.resetTimeoutMs | How long refreshes are then put off.
token_refresh_breaker.scope | choice provider/connection | provider | tokenRefreshBreaker.scope | What failed refreshes are counted for.
## provider_cooldown.md
provider_cooldown.{class}.failure_threshold | int 1..100_000 | 10 15 2 . | | Failures within the window that cool the provider.
provider_cooldown.{class}.failure_window_ms | int 0..86_400_000 | 900_000 1_800_000 300_000 . | | Sliding window.
provider_cooldown.{class}.cooldown_ms | int 0..86_400_000 | 300_000 600_000 60_000 . | | How long the provider then cools.
provider_cooldown.enabled | bool | false | providerCooldown.enabled | Cross-request memory of failing providers; on when the setting or the environment says so.
provider_cooldown.min_ms | int 0..3_600_000 | 5_000 | providerCooldown.minRetryCooldownMs | First step for a connection.
provider_cooldown.max_ms | int 0..86_400_000 | 300_000 | providerCooldown.maxRetryCooldownMs | Longest step; read as at least min_ms.
## operator_surface.md section 3
quota_preflight.enabled | bool | false | quotaPreflight.enabled | Leave out accounts whose reported quota is nearly spent.
quota_preflight.cutoff_percent | int 0..99 | 2 | quotaPreflight.cutoffPercent | Remaining share at or below which an account is left out.
quota_preflight.warn_percent | int 0..100 | 20 | quotaPreflight.warnPercent | Remaining share that draws a warning; read as at least cutoff_percent + 1.
## queue_admission.md section 1
queue.auto_enable_api_key_providers | bool | false | requestQueue.autoEnableApiKeyProviders | Pace active API-key connections without being told.
queue.requests_per_minute | int 1..1_000_000 | 60 | requestQueue.requestsPerMinute | Starts a minute of one limiter.
queue.min_time_between_requests_ms | int 0..3_600_000 | 350 | requestQueue.minTimeBetweenRequestsMs | Gap between two starts of one limiter.
queue.concurrent_requests | int 1..10_000 | 6 | requestQueue.concurrentRequests | Running at once, per limiter.
queue.global_concurrent_requests | int 0..100_000 | 0 | requestQueue.globalConcurrentRequests | Running at once in the whole fleet; 0: off.
queue.max_wait_ms | int 1..86_400_000 ! | 30_000 | requestQueue.maxWaitMs | Longest time in the queue; never bounds execution.
queue.execution_max_wait_ms | int 1..86_400_000 ! | 600_000 | requestQueue.executionMaxWaitMs | Longest execution after dispatch; never bounds waiting.
queue.max_queue_depth | int 0..100_000 | 0 | requestQueue.maxQueueDepth | Queued at once, per limiter; 0: off.
queue.unbounded_wait | bool | false | requestQueue.unboundedWait | No queue deadline of its own; the caller's budget alone counts.
queue.wedge_after_ms | int 1_000..600_000 | 60_000 | requestQueue.wedgeAfterMs | Time without a start after which a stuck limiter is reset.
## model_lockout.md section 5
model_lockout.enabled | bool | false | modelLockout.enabled | Pool lockout.
model_lockout.error_codes | int_list 100..599 | 403,404,429,502,503,504 | modelLockout.errorCodes | Statuses of pool attempts that lock the model.
model_lockout.base_cooldown_ms | int 5_000..600_000 | 120_000 | modelLockout.baseCooldownMs | First step of the pool lockout.
model_lockout.max_cooldown_ms | int 5_000..3_600_000 | 1_800_000 | modelLockout.maxCooldownMs | Cap of ladder cooldowns and locks; read as at least the base.
model_lockout.max_backoff_steps | int 0..20 | 10 | modelLockout.maxBackoffSteps | Highest step of the lock ladder.
model_lockout.use_exponential_backoff | bool | true | modelLockout.useExponentialBackoff | False: every lock lasts the base.
model_lockout.slow_first_output.enabled | bool | false | | Lock models that start late.
model_lockout.slow_first_output.providers | text_list | nvidia | | Providers watched.
model_lockout.slow_first_output.threshold_ms | int 1_000..3_600_000 | 120_000 | | First useful output later than this is one event.
## terminal_states.md
terminal.custom_ban_signals | text_list | | | Further ban texts, each at most 200 characters.
terminal.auto_disable_banned | bool | false | | A ban also switches the connection off.
terminal.auto_disable_scope | choice all/subscription | all | | Which connections auto_disable_banned concerns.
terminal.ambiguous_401_soft_lockout | bool | false | | Soft strikes for ambiguous 401s.
## retry_hints.md section 4.1
retry_hints.extended_texts | bool | true | retryHintsExtendedTexts | Read waiting phrases beyond the reference's.
## retry_hints.md section 1
retry_hints.extended_reset_headers | bool | true | retryHintsExtendedResetHeaders | Read reset headers where Retry-After is absent.
## classification.md section 7
daily_reset_zone | text | - | | IANA zone of daily quotas; unset: the zone of the host. Set it in a fleet.
## classification.md section 6
rotation.enabled | bool | false | | Rotation gate.
rotation.on_429 | bool | true | | Fail over on 429.
rotation.on_500 | bool | true | | Fail over on 500.
rotation.on_502 | bool | true | | Fail over on 502.
rotation.on_400 | bool | true | | Fail over on 400.
rotation.threshold_429 | int 1..1000 | 1 | | Failures with 429 within the window before failing over.
rotation.threshold_500 | int 1..1000 | 1 | | Failures with 500 within the window before failing over.
rotation.threshold_502 | int 1..1000 | 1 | | Failures with 502 within the window before failing over.
rotation.threshold_400 | int 1..1000 | 1 | | Failures with 400 within the window before failing over.
rotation.window_ms | int 0..86_400_000 | 120_000 | | Window of the gate.
## connection_cooldown.md section 3
rotation.rate_limit_reset_seconds | float 0..86_400 | 0 | | Fixed wait of rate limits; 0: off.
## egress_lock.md section 2
egress_lock.providers | text | - | | Comma list that replaces the default set; none, off, false or 0: empty.
## guards.md section 6
pool_guard.enabled | bool | false | | Keep soft exclusions from emptying a pool.
pool_guard.max_excluded_share | float 0..1 | 0.5 | | Share that may be excluded at one time.
pool_guard.panic_max_in_flight | int 0..1000 | 1 | | Panic calls per pool in the fleet.
## guards.md section 7
early_probe.enabled | bool | false | | Test long blocks before their end.
early_probe.min_block_ms | int 0..2_592_000_000 | 600_000 | | Shortest block that is tested.
early_probe.interval_ms | int 1_000..2_592_000_000 | 300_000 | | One permit per this time and key.
early_probe.include_server_stated | bool | false | | Test deadlines stated by the server too.
## cooldown_wait.md section 1
cooldown_wait.enabled | bool | true | comboCooldownWait.enabled | Wait out short cooldowns of a route.
cooldown_wait.max_wait_ms | int 0..300_000 | 90_000 | comboCooldownWait.maxWaitMs | Longest single wait.
cooldown_wait.max_attempts | int 0..10 | 5 | comboCooldownWait.maxAttempts | Waits a request.
cooldown_wait.budget_ms | int 0..300_000 | 300_000 | comboCooldownWait.budgetMs | Waiting time a request; read as at least max_wait_ms.
## cooldown_wait.md section 4
direct_wait.enabled | bool | true | waitForCooldown.enabled | The same without a route.
direct_wait.max_retries | int 0..10 | 5 | waitForCooldown.maxRetries | Waits a request.
direct_wait.max_retry_wait_s | int 0..300 | 90 | waitForCooldown.maxRetryWaitSec | Longest single wait.
direct_wait.budget_ms | int 0..300_000 | 300_000 | waitForCooldown.budgetMs | Waiting time a request; read as at least max_retry_wait_s x 1000.
## watchdog.md section 1
stream_watchdog.enabled | bool | false | streamRecovery.throughputWatchdog.enabled | Abort streams that keep sending but hardly any output.
stream_watchdog.warmup_ms | int 0..600_000 | 30_000 | streamRecovery.throughputWatchdog.warmupMs | Time before a stream is judged, beside the window.
stream_watchdog.window_ms | int 1_000..600_000 | 30_000 | streamRecovery.throughputWatchdog.windowMs | Window of the rate.
stream_watchdog.min_useful_bytes_per_second | int 1..1_000_000 | 4 | streamRecovery.throughputWatchdog.minUsefulBytesPerSecond | Slower than this is aborted.
stream_watchdog.min_useful_bytes | int 1..1_000_000 | 1 | streamRecovery.throughputWatchdog.minUsefulBytes | Less than this, but not nothing, is too little to judge.
## operator_surface.md section 3
stream_recovery.enabled | bool | false | streamRecovery.enabled | The gateway may open an aborted stream again before its first visible byte.
stream_recovery.midstream_enabled | bool | false | streamRecovery.midstreamEnabled | The gateway may continue an aborted stream after its first visible byte.
## concurrency.md section 4.2
concurrency.quota_share.enabled | bool | true | quotaShareConcurrencyLimit.enabled | Permits for quota-share routes.
concurrency.quota_share.on_saturation | choice proceed/reject | proceed | quotaShareConcurrencyLimit.onSaturation | What a full gate means.
## concurrency.md section 2.1
concurrency.permit_ttl_ms | int 1_000..1_800_000 | 120_000 | quotaShareConcurrencyLimit.permitTtlMs | Life of a permit without renewal.
## leases.md section 5
lease.lock_delay_ms | int 0..600_000 | 0 | sessionLease.lockDelayMs | Pause of a connection after a lapsed lease.
## affinity.md section 2
affinity.ttl_ms | int 0..2_592_000_000 | 0 | sessionAffinityTtlMs | Life of a session pin; 0: off.
affinity.legacy_ttl_ms | int 0..2_592_000_000 | - | codexSessionAffinityTtlMs | Older name of affinity.ttl_ms; serves only where that one is not set.
## affinity.md section 4
affinity.on_ineligible | choice detour/repin | detour | sessionAffinityOnIneligible | What a temporarily ineligible pin means.
## affinity.md section 3
affinity.require_caller | bool | false | affinityRequireCaller | No pins for anonymous requests.
## affinity.md section 8
affinity.disable_route_stickiness | bool | false | disableSessionStickiness | Switch route stickiness off.
## usage_wall.md section 8.3
usage_wall.not_offered_memo_ms | int 60_000..691_200_000 | 604_800_000 | usageWall.notOfferedMemoMs | Memory of a reset that was not offered.
## operator_surface.md section 3
credential_health_check.interval_min | int 0..1440 | 0 | credentialHealthCheck.intervalMinutes | How often the gateway is asked to test credentials; 0: never.
quota_aware_routing | bool | false | quotaAwareRouting | Prefer accounts with quota left where the strategy allows it.
compat.response_headers | bool | false | compat.responseHeaders | Add the older names to the headers meant for clients.
## strategies.md section 2
strategies.quota_ttl_ms | int 0..300_000 | 300_000 | strategies.quotaTtlMs | How long a quota snapshot is fresh.
strategies.quota_stale_ms | int 0..3_600_000 | 0 | strategies.quotaStaleMs | How much longer it may serve when nothing newer exists.
## strategies.md section 4
strategies.sticky_round_robin_limit | int 0..1_000_000 | 3 | strategies.stickyRoundRobinLimit | Requests a round-robin route stays with one target; 0 or 1: rotates with every request. A route's own option wins.
## strategies.md section 1
fallback_strategy | choice {account} | fill-first | fallbackStrategy | How a connection is picked where a target names none; provider_strategies of the catalogue wins.
## degradations.md section 2
tools.max_limit | int 1..10_000 + | 128 | tools.maxLimit | Tools sent with one request where the provider stated no smaller limit.
## degradations.md section 3
emergency_fallback | bool | true | emergencyFallback | After a spent budget, offer the emergency target once.
emergency_target.provider | text | nvidia | emergencyTarget.provider | Provider of the emergency target.
emergency_target.model | text | openai/gpt-oss-120b | emergencyTarget.model | Model of the emergency target.
emergency_target.max_output_tokens | int 1..1_000_000 | 4096 | emergencyTarget.maxOutputTokens | Cap of its output.
"""  # noqa: E501  (a table reads better than wrapped rows)

ENV_ALIASES.update(
    {
        "provider_cooldown.enabled": "PROVIDER_COOLDOWN_ENABLED",
        **{
            f"provider_cooldown.{auth}.{field}": f"OMNIROUTE_PROVIDER_BREAKER_{auth}_{field}".upper()
            for auth in ("oauth", "api_key")
            for field in ("failure_threshold", "failure_window_ms", "cooldown_ms")
        },
        "queue.max_wait_ms": "RATE_LIMIT_MAX_WAIT_MS",
        "queue.execution_max_wait_ms": "RATE_LIMIT_EXECUTION_MAX_WAIT_MS",
        "queue.max_queue_depth": "RATE_LIMIT_MAX_QUEUE_DEPTH",
        "stream_watchdog.enabled": "STREAM_THROUGHPUT_WATCHDOG_ENABLED",
        "emergency_fallback": "OMNIROUTE_EMERGENCY_FALLBACK",
    }
)
STORED_FALLBACKS["affinity.ttl_ms"] = "affinity.legacy_ttl_ms"

_ENVIRONMENT_RULES = {"!": "clamped", "+": "positive_int"}
_SWITCH_WORDS = {"true": True, "false": False}


def _literal(kind: str, text: str) -> object:
    """A default as written in the table."""
    if text == "-":
        return None
    if kind == "bool":
        return _SWITCH_WORDS[text]
    if kind in ("int", "float"):
        return float(text) if "." in text else int(text)
    if kind.endswith("_list"):
        parts = [part for part in text.split(",") if part]
        return tuple(int(part) for part in parts) if kind == "int_list" else tuple(parts)
    return text


def _spec(row: str, spec: str) -> SettingSpec:
    name, type_text, default, rest, doc = (cell.strip() for cell in row.split("|", 4))
    kind, _, limits = type_text.replace("{account}", "/".join(ACCOUNT_STRATEGIES)).partition(" ")
    limits, _, mark = limits.partition(" ")
    low, dots, high = limits.partition("..")
    return SettingSpec(
        name,
        kind,
        _literal(kind, default),
        float(low) if dots else None,
        float(high) if dots else None,
        tuple(limits.split("/")) if kind == "choice" else (),
        next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), ""),
        doc,
        spec,
        rest,
        _ENVIRONMENT_RULES.get(mark, "as_is"),
    )


def _expand(row: str) -> Iterator[str]:
    """The rows that one row stands for: one per auth class where it says `{class}`."""
    if "{class}" not in row:
        yield row
        return
    name, type_text, defaults, rest, doc = (cell.strip() for cell in row.split("|", 4))
    for auth, default in zip(CLASSES, defaults.split(), strict=True):
        if default != ".":
            own_rest = rest.replace("{class}", _REST_CLASS[auth]) if auth in _REST_CLASS else ""
            yield f"{name.replace('{class}', auth)} | {type_text} | {default} | {own_rest} | {doc}"


def _specs(table: str) -> Iterator[SettingSpec]:
    spec = ""
    for line in filter(None, table.splitlines()):
        if line.startswith("## "):
            spec = line.removeprefix("## ")
        else:
            yield from (_spec(row, spec) for row in _expand(line))


register(*_specs(_TABLE))
