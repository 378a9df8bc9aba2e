"""Answers of the service for tests of the stages."""

from __future__ import annotations

from collections.abc import Sequence

from policy_envoy.flight import Flight, from_answer

from policy_service.generated.policy.v1 import permit_pb2, policy_pb2, types_pb2


def target(connection: str, model: str = "m") -> types_pb2.Target:
    """A target of the provider `p`."""
    return types_pb2.Target(provider="p", connection=connection, model=model, key=connection, address="127.0.0.1:1")


def dispatched(*connections: str, permits: Sequence[str] = (), token: bytes = b"t1") -> policy_pb2.SelectTargetResponse:
    """A dispatch to the first, with the others behind it."""
    targets = [target(connection) for connection in connections]
    held = [permit_pb2.Permit(permit_id=each, expires_at_unix_ms=30_000) for each in permits]
    dispatch = policy_pb2.Dispatch(target=targets[0], fallbacks=targets[1:], permits=held)
    return policy_pb2.SelectTargetResponse(decision_id="d1", decision_token=token, dispatch=dispatch)


def flight_of(*connections: str, permits: Sequence[str] = ()) -> Flight:
    """A routed request."""
    flight = from_answer(dispatched(*connections, permits=permits), 0)
    flight.path = "/v1/chat/completions"
    flight.request = policy_pb2.SelectTargetRequest(route="chat")
    return flight


def judged(kind: int, *, following: str = "", delay_ms: int = 0, status: int = 0) -> policy_pb2.ReportOutcomeResponse:
    """A verdict with the next step."""
    action = policy_pb2.Action(kind=kind, delay_ms=delay_ms)  # type: ignore[arg-type]
    if following:
        action.next_target.CopyFrom(target(following))
    verdict = policy_pb2.Verdict(restated_status=status) if status else policy_pb2.Verdict()
    return policy_pb2.ReportOutcomeResponse(verdict=verdict, action=action)
