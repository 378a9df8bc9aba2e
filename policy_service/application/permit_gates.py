"""Which gates a dispatch passes (spec/concurrency.md sections 1 and 5, spec/queue_admission.md section 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from policy_service.application.permit_work import QUEUE_TIMEOUT_MS, Passage, PermitRefusal
from policy_service.domain.catalogue import Provider
from policy_service.domain.gates import Gate, Pace
from policy_service.domain.ids import AuthClass, Target
from policy_service.domain.lockout_keys import scoped_model
from policy_service.domain.permits import (
    OnSaturation,
    PermitCode,
    cap_of,
    combined,
    connection_gate,
    proceeds_without_permit,
    round_robin_gate,
    takes_permit,
)
from policy_service.domain.policy import ConnectionPolicy, Policy
from policy_service.domain.profiles import QueueProfile
from policy_service.domain.queue_admission import FLEET_GATE, LimiterScope, limiter_gate, limiter_key

FREE = Passage()
LINE_DEPTH = 20
_NO_OPTIONS: Mapping[str, object] = {}


def passage_of(
    policy: Policy,
    target: Target,
    *,
    strategy: str = "",
    options: Mapping[str, object] = _NO_OPTIONS,
    inline_cap: float | None = None,
    auth_class: AuthClass | None = None,
    round_robin_key: str = "",
) -> Passage:
    """Gates of one dispatch, FREE where it takes no permit.

    Args:
        strategy: of the route; "" without a route.
        options: of the route (`queue_timeout_ms`, `queue_depth`, `concurrency`).
        inline_cap: cap stated with the candidate, where the catalogue declares none.
        round_robin_key: `<route>:<target key>` of a round-robin target.
    """
    found = policy.for_connection(target.provider, target.connection, auth_class)
    cap = cap_of(found.connection.max_concurrent)
    cap = cap_of(inline_cap) if cap is None else cap
    depth = _whole(options.get("queue_depth"), LINE_DEPTH)
    gates = list(_slots(policy, target, strategy, cap, depth))
    if cap is None and round_robin_key and (limit := cap_of(options.get("concurrency"))) is not None:
        gates.append(Gate(round_robin_gate(*round_robin_key.split(":", 1)), limit, depth))
    timeout_ms = _whole(options.get("queue_timeout_ms"), QUEUE_TIMEOUT_MS)
    return _paced(policy, found, target, gates, timeout_ms)


def _slots(policy: Policy, target: Target, strategy: str, cap: int | None, depth: int) -> Iterable[Gate]:
    if target.connection and takes_permit(strategy, cap, bool(policy.setting("concurrency.quota_share.enabled"))):
        yield Gate(connection_gate(target.connection), cap, depth)


def _paced(policy: Policy, found: ConnectionPolicy, target: Target, gates: list[Gate], timeout_ms: int) -> Passage:
    profile = found.queue
    if profile is None or not target.connection:
        return Passage(combined(gates), timeout_ms=timeout_ms, revision=policy.revision) if gates else FREE
    key = queue_key(found, target)
    gates.append(limiter_gate(key, profile))
    if policy.queue_fleet_limit is not None:
        gates.append(Gate(FLEET_GATE, policy.queue_fleet_limit, depth=0))
    return Passage(combined(gates), key, profile, profile.max_wait_ms, policy.revision, _start_gate(found.provider))


def _start_gate(provider: Provider) -> Gate | None:
    """Static start slots: one line over all connections of the provider."""
    gap_ms = provider.start_slot_ms
    return Gate(f"start:{provider.id}", depth=0, pace=Pace(gap_ms=gap_ms)) if gap_ms else None


def queue_key(found: ConnectionPolicy, target: Target) -> str:
    """Key of the limiter of a target."""
    scoped = scoped_model(found.provider, target.model) if target.model else ""
    return limiter_key(
        found.provider.id,
        target.connection,
        LimiterScope(found.provider.queue_scope),
        model=target.model,
        family=scoped,
        quota_scope=scoped,
    )


def reconfigured(policy: Policy, passage: Passage) -> Passage:
    """The same gates as a newer policy declares them; those that it does not know stay as they are."""
    gates = tuple(_declared(policy, passage, gate) for gate in passage.gates)
    profile = profile_of(policy, passage.limiter) if passage.limiter else None
    return replace(passage, gates=gates, profile=profile or passage.profile, revision=policy.revision)


def _declared(policy: Policy, passage: Passage, gate: Gate) -> Gate:
    if gate.key == FLEET_GATE:
        return replace(gate, limit=policy.queue_fleet_limit)
    if gate.key == passage.limiter:
        profile = profile_of(policy, gate.key)
        return gate if profile is None else limiter_gate(gate.key, profile)
    _, is_connection, connection = gate.key.partition(connection_gate(""))
    known = policy.catalogue.connections.get(connection) if is_connection else None
    return gate if known is None else replace(gate, limit=cap_of(known.max_concurrent))


def proceeds(policy: Policy, strategy: str, refusal: PermitRefusal) -> bool:
    """True if a refused dispatch goes on without a permit (spec/concurrency.md section 4.2)."""
    mode = OnSaturation(policy.setting("concurrency.quota_share.on_saturation"))
    return any(refusal.code == code and proceeds_without_permit(strategy, mode, code) for code in PermitCode)


def profile_of(policy: Policy, key: str) -> QueueProfile | None:
    """Profile of the limiter with a key; None for other gates."""
    provider, _, rest = key.partition(":")
    connection = rest if rest in policy.catalogue.connections else rest.partition(":")[0]
    return policy.for_connection(provider, connection).queue if connection else None


def passage_of_keys(policy: Policy, gates: Iterable[Gate]) -> Passage:
    """Gates that a caller names itself; a declared cap of a connection cannot be raised by it."""
    declared = {
        connection_gate(each.id): Gate(connection_gate(each.id), each.max_concurrent)
        for each in policy.catalogue.connections.values()
        if policy.is_capped(each.id)
    }
    asked = tuple(gates)
    known = (declared[gate.key] for gate in asked if gate.key in declared)
    return Passage(combined((*asked, *known)), revision=policy.revision)


def _whole(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
