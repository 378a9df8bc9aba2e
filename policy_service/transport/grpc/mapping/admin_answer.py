"""Answers of AdminService on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from policy_service.application.admin_candidates import CandidateView, RouteCandidates
from policy_service.application.admin_catalogue import RuleWarning, Setting, Settings
from policy_service.application.admin_health import Health, mechanism_of
from policy_service.application.admin_listings import BreakerView, StatePage, StateRow
from policy_service.application.ports_fleet import Sighting
from policy_service.domain import facts as recorded
from policy_service.domain.ids import Instant
from policy_service.domain.lockout_upkeep import LockListing
from policy_service.generated.policy.v1 import admin_pb2
from policy_service.transport.grpc.mapping.admin_request import write_place
from policy_service.transport.grpc.mapping.select_answer import exclusion, target
from policy_service.transport.grpc.wire_enums import BREAKER_CONTROL, BREAKER_STATE, HEALTH, MECHANISM


def breaker(each: BreakerView) -> admin_pb2.Breaker:
    """One breaker."""
    return admin_pb2.Breaker(
        key=each.key,
        state=BREAKER_STATE.number(each.state.lower()),
        control=BREAKER_CONTROL.number(each.control),
        failure_count=each.failure_count,
        retry_after_ms=each.retry_after_ms,
        generation=each.generation,
        live_probes=each.live_probes,
        last_failure_at_unix_ms=each.last_failure_at,
        state_text=each.state,
    )


def model_cooldown(each: LockListing) -> admin_pb2.ModelCooldown:
    """One model lock."""
    return admin_pb2.ModelCooldown(
        provider=each.provider,
        connection=each.connection,
        model=each.model,
        reason=each.reason,
        expires_at_unix_ms=each.until,
        remaining_ms=each.remaining_ms,
        failure_count=each.failure_count,
    )


def candidates(found: RouteCandidates) -> admin_pb2.ListCandidatesResponse:
    """Candidates of a route."""
    return admin_pb2.ListCandidatesResponse(candidates=map(_candidate, found.candidates), strategy=found.strategy)


def _candidate(each: CandidateView) -> admin_pb2.CandidateView:
    shown = None if each.exclusion is None else exclusion(each.exclusion)
    return admin_pb2.CandidateView(target=target(each.target, each.key), eligible=shown is None, exclusion=shown)


def state_page(page: StatePage) -> admin_pb2.ListStateResponse:
    """One page of state."""
    return admin_pb2.ListStateResponse(
        rows=map(_state_row, page.rows), next_page_token=write_place(page.after), view_age_ms=page.view_age_ms
    )


def _state_row(each: StateRow) -> admin_pb2.StateRow:
    return admin_pb2.StateRow(
        mechanism=MECHANISM.number(each.mechanism),
        mechanism_text=each.mechanism,
        key=each.key,
        provider=each.provider,
        connection=each.connection,
        model=each.model,
        state=each.state,
        until_at_unix_ms=each.until,
        generation=each.generation,
        fields=struct({**asdict(each.row), "health_score": each.health_score}),  # type: ignore[call-overload]
    )


def struct(fields: dict[str, Any]) -> Struct:
    """Fields for people; what is empty is left out."""
    message = Struct()
    message.update({name: _plain(value) for name, value in fields.items() if value not in (None, "", (), [])})
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)


def fact(each: recorded.Fact) -> admin_pb2.Fact:
    """One recorded transition."""
    return admin_pb2.Fact(
        id=each.id,
        at_unix_ms=each.at,
        mechanism=MECHANISM.number(mechanism_of(each)),
        mechanism_text=each.mechanism,
        key=each.key,
        from_state=each.from_state,
        to_state=each.to_state,
        provider=each.provider,
        connection=each.connection,
        model=each.model,
        generation=each.generation,
        deadline_at_unix_ms=each.deadline_at,
        decision_id=each.decision_id,
        request_id=each.request_id,
        status=each.status,
        restated_status=each.restated_status,
        reason=each.reason,
        rule_id=each.rule_id or "",
        hint_source=each.hint_source or "",
        replica=each.replica,
        actor=each.actor,
        rule=each.rule,
        failure_count=each.failure_count,
    )


def _replica(each: Sighting, now: Instant) -> admin_pb2.ReplicaHealth:
    name, release = each.signer.name, each.signer.release
    return admin_pb2.ReplicaHealth(replica=name, last_seen_ms=max(0, now - each.seen_at), version=release)


def health(each: Health, release: str) -> admin_pb2.GetHealthResponse:
    """Condition of the service."""
    return admin_pb2.GetHealthResponse(
        status=HEALTH.number(each.status),
        replica=each.replica,
        replicas=[_replica(sighting, each.now) for sighting in each.replicas],
        database=admin_pb2.DatabaseHealth(reachable=each.is_database_reachable, latency_ms=each.database_latency_ms),
        policy_revision=each.policy_revision,
        view_age_ms=each.view_age_ms,
        breakers=map(breaker, each.breakers),
        cooling_connections=each.counts.cooling_connections,
        model_lockouts=each.counts.model_lockouts,
        active_leases=each.owned.active_leases,
        held_permits=each.owned.held_permits,
        waiting_permits=each.owned.waiting_permits,
        active_lanes=each.counts.active_lanes,
        version=release,
        spooled_events=each.spooled_events,
        convergence=admin_pb2.Convergence(**each.convergence._asdict()),
        ignored_reports=each.ignored_reports,
    )


def settings(each: Settings, *, with_sources: bool) -> admin_pb2.GetSettingsResponse:
    """Settings in force."""
    return admin_pb2.GetSettingsResponse(settings=wire_settings(each.settings, with_sources), version=each.version)


def wire_settings(found: Iterable[Setting], with_sources: bool) -> list[admin_pb2.Setting]:
    """Settings one by one."""
    return [
        admin_pb2.Setting(name=each.name, value=_value(each.value), source=each.source if with_sources else "")
        for each in found
    ]


def _value(value: Any) -> Value:
    holder = Struct()
    holder.update({"value": _plain(value)})
    return holder.fields["value"]


def warning(each: RuleWarning) -> admin_pb2.RuleWarning:
    """One warning about a document."""
    return admin_pb2.RuleWarning(**each._asdict())
