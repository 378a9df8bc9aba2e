"""What is sent: the calls of the measurement, built against the running service, and the catalogue it runs with."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from policy_service.generated.policy.v1 import policy_pb2, types_pb2

POOL: Final = 8
BATCH: Final = 64
POOLS: Final = (8, 100, 1_000)
PROVIDER: Final = "openai"
FAILING_PROVIDER: Final = "groq"
"""Another one than that of the selections, whose traffic stays healthy."""
MODEL: Final = "gpt-4o"
SERVICE: Final = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"]

Ask = Callable[[str, bytes], Awaitable[bytes]]
"""Calls a method of the service by name: request bytes to answer bytes."""

_REPORT_ID_TAG: Final = bytes([policy_pb2.ReportOutcomeRequest.REPORT_ID_FIELD_NUMBER << 3 | 2])
_ERROR_BODY: Final = json.dumps(
    {
        "error": {
            "message": "Rate limit reached for gpt-4o on tokens per min (TPM): Limit 30000, Used 29900, Requested 500.",
            "type": "tokens",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    }
).encode()


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of call.

    Args:
        items: decisions or reports in one call.
        streams: calls in flight on each connection of a busy round.
        is_distinct: every call carries a report id of its own, else the service would answer a repetition.
    """

    name: str
    title: str
    method: str
    request: bytes
    items: int = 1
    streams: int = 16
    is_distinct: bool = False

    def body(self, run: str, number: int) -> bytes:
        """Bytes of one request; protobuf takes a field that is appended as if it had been set."""
        if not self.is_distinct:
            return self.request
        report_id = f"{run}-{number:012d}".encode()
        return self.request + _REPORT_ID_TAG + bytes([len(report_id)]) + report_id

    def messages(self) -> tuple[Any, Any]:
        """Generated classes of request and answer."""
        method = SERVICE.methods_by_name[self.method]
        return getattr(policy_pb2, method.input_type.name), getattr(policy_pb2, method.output_type.name)


def route_name(size: int) -> str:
    """Name of the route with that many targets."""
    return f"bench-{size}"


def catalogue() -> str:
    """Catalogue file (JSON is YAML) with one route for each size of pool."""
    connections = [{"id": f"key-{i}", "provider": PROVIDER, "auth_class": "api_key"} for i in range(max(POOLS))]
    routes = [{"name": route_name(size), "strategy": "priority", "targets": _targets(size)} for size in POOLS]
    return json.dumps({"version": 1, "connections": connections, "routes": routes})


def _targets(size: int) -> list[dict[str, str]]:
    return [{"connection": f"key-{i}", "model": MODEL} for i in range(size)]


def inline_request(size: int = POOL) -> policy_pb2.SelectTargetRequest:
    """A selection over inline candidates."""
    named = [types_pb2.Candidate(provider=PROVIDER, connection=f"key-{i}", model=MODEL) for i in range(size)]
    return policy_pb2.SelectTargetRequest(request_id="bench-request", candidates=named)


def route_request(size: int = POOL) -> policy_pb2.SelectTargetRequest:
    """A selection over a named route."""
    return policy_pb2.SelectTargetRequest(request_id="bench-request", route=route_name(size))


def success_request(token: bytes) -> policy_pb2.ReportOutcomeRequest:
    """The report of a 200 under a decision token."""
    return policy_pb2.ReportOutcomeRequest(
        decision_token=token, http_status=200, latency_ms=420, first_byte_ms=180, final=True
    )


def failure_request() -> policy_pb2.ReportOutcomeRequest:
    """The report of a rate limit, without token; the report id is added to each call."""
    names = (("content-type", "application/json"), ("x-request-id", "req_1"), ("retry-after", "2"))
    return policy_pb2.ReportOutcomeRequest(
        target=types_pb2.Target(provider=FAILING_PROVIDER, connection="failing", model=MODEL),
        http_status=429,
        headers=[types_pb2.Header(name=name, value=value) for name, value in names],
        body=_ERROR_BODY,
        elapsed_ms=5,
        final=True,
    )


async def build(ask: Ask) -> tuple[Case, ...]:
    """Every case; asks the service for the token that a success is reported under."""
    inline = inline_request()
    selected = policy_pb2.SelectTargetResponse.FromString(await ask("SelectTarget", inline.SerializeToString()))
    batch = policy_pb2.SelectTargetsRequest(items=[inline] * BATCH)
    success = success_request(selected.decision_token)
    return (
        Case("select_inline", "SelectTarget, 8 inline", "SelectTarget", inline.SerializeToString()),
        Case("select_route", "SelectTarget, route of 8", "SelectTarget", route_request().SerializeToString()),
        Case("select_batch", "SelectTargets, 64 x 8 inline", "SelectTargets", batch.SerializeToString(), BATCH, 1),
        Case("report_success", "ReportOutcome, success", "ReportOutcome", success.SerializeToString()),
        Case(
            "report_failure",
            "ReportOutcome, failure",
            "ReportOutcome",
            failure_request().SerializeToString(),
            is_distinct=True,
        ),
    )
