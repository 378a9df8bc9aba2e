"""Messages of the contract from the short form of the cases: names become targets, lives become instants.

Pure. What the cases leave out is what a service in good health would say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format

from policy_service.generated.policy.v1 import permit_pb2, policy_pb2

PROVIDER: Final = "openai"
"""Of every connection, so that a gateway knows how to speak to it."""
_TARGETS: Final = ("target", "nextTarget", "next_target", "replaced")


def model_of(connection: str) -> str:
    """Model that is to be sent to a connection."""
    return f"model-of-{connection}"


def target_of(connection: str, addresses: Mapping[str, str]) -> dict[str, str]:
    """JSON form of a target."""
    return {
        "provider": PROVIDER,
        "connection": connection,
        "model": model_of(connection),
        "key": connection,
        "address": addresses.get(connection, ""),
    }


def expand(short: Any, addresses: Mapping[str, str], now_ms: int, prefix: str) -> Any:
    """The JSON form of a message from its short form.

    Args:
        addresses: host:port of each connection.
        now_ms: database time of the scripted service.
        prefix: made part of permit ids, so that none is met in two cases.
    """
    if isinstance(short, list):
        return [expand(each, addresses, now_ms, prefix) for each in short]
    if not isinstance(short, Mapping):
        return short
    return {name: _expanded(name, value, addresses, now_ms, prefix) for name, value in short.items()}


def _expanded(name: str, value: Any, addresses: Mapping[str, str], now_ms: int, prefix: str) -> Any:
    if name in _TARGETS and isinstance(value, str):
        return target_of(value, addresses)
    if name == "fallbacks":
        return [target_of(each, addresses) for each in value]
    if name == "permits":
        return [permit(each, now_ms, prefix) for each in value]
    return expand(value, addresses, now_ms, prefix)


def permit(short: Mapping[str, Any], now_ms: int, prefix: str) -> dict[str, Any]:
    """A permit; `ttl_ms` becomes its end."""
    rest = {name: value for name, value in short.items() if name not in ("permit_id", "ttl_ms")}
    end = now_ms + int(short.get("ttl_ms", 60_000))
    return {"kind": "PERMIT_KIND_CONCURRENCY", **rest, "permit_id": f"{prefix}/{short['permit_id']}"} | {
        "expires_at_unix_ms": end
    }


def selection(document: Mapping[str, Any]) -> policy_pb2.SelectTargetResponse:
    """Answer of SelectTarget."""
    return json_format.ParseDict(dict(document), policy_pb2.SelectTargetResponse())


def judgement(document: Mapping[str, Any]) -> policy_pb2.ReportOutcomeResponse:
    """Answer of ReportOutcome."""
    return json_format.ParseDict({"durable": True, **document}, policy_pb2.ReportOutcomeResponse())


def usual_judgement(request: policy_pb2.ReportOutcomeRequest) -> policy_pb2.ReportOutcomeResponse:
    """What is made of an outcome where the case has no answer left: give it to the client."""
    is_success = 200 <= request.http_status < 300 and not request.details.stream_error
    answer = policy_pb2.ReportOutcomeResponse(durable=True)
    answer.verdict.success = is_success
    answer.verdict.reason_text = "none" if is_success else "server_error"
    answer.verdict.scope_text = "none" if is_success else "connection"
    answer.action.kind = policy_pb2.ACTION_KIND_RETURN_TO_CLIENT
    answer.action.kind_text = "return_to_client"
    return answer


def refusal_past_the_script() -> dict[str, Any]:
    """Answer to a SelectTarget that the case does not expect."""
    return {
        "reject": {
            "http_status": 503,
            "code": "PAST_THE_SCRIPT",
            "type": "service_unavailable",
            "message": "the case expects no further SelectTarget",
        }
    }


def refusal_in_place_of(wait: Mapping[str, Any]) -> dict[str, Any]:
    """What a service answers in place of this Wait to a call with `allow_wait: false`."""
    return {
        "reject": {
            "http_status": 429,
            "code": "ALL_TARGETS_SKIPPED",
            "type": "rate_limit_error",
            "terminal_reason_text": "all_targets_cooling_down",
            "message": "every target of the pool cools down",
            "retry_after_ms": -(-int(wait["wait_ms"]) // 1_000) * 1_000,
        }
    }


def renewed(ids: list[str], until_ms: int) -> permit_pb2.RenewPermitResponse:
    """Every permit lives on."""
    results = [
        permit_pb2.PermitResult(permit_id=each, state=permit_pb2.PERMIT_STATE_HELD, expires_at_unix_ms=until_ms)
        for each in ids
    ]
    return permit_pb2.RenewPermitResponse(results=results)


def released(ids: list[str]) -> permit_pb2.ReleasePermitResponse:
    """Every permit is free."""
    results = [permit_pb2.PermitResult(permit_id=each, state=permit_pb2.PERMIT_STATE_RELEASED) for each in ids]
    return permit_pb2.ReleasePermitResponse(results=results)
