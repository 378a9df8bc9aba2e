"""ListCandidates over real gRPC and real Postgres: what keeps each candidate of a route out, and nothing is touched."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from policy_service.generated.policy.v1 import admin_pb2, policy_pb2
from tests.integration.operating import Replica, operated, refused, until
from tests.integration.serving import outcome

CATALOGUE = """
connections:
  - {id: b, provider: openai, priority: 2}
  - {id: a, provider: openai, priority: 1}
  - {id: capped, provider: groq, max_concurrent: 1}
  - {id: off, provider: mistral, enabled: false}
  - {id: managed, provider: deepseek}
routes:
  - name: mixed
    strategy: round-robin
    targets:
      - {provider: openai, model: m}
      - {provider: groq, connection: capped, model: m}
      - {provider: mistral, connection: "off", model: m}
      - {provider: deepseek, connection: managed, model: m}
callers:
  - {id: agent, key_sha256: KEY, scopes: ["lease:exclusive"], allowed_connections: [managed]}
"""
MIXED = admin_pb2.ListCandidatesRequest(route="mixed")
ASK = policy_pb2.SelectTargetRequest(route="mixed", allow_wait=False)


@asynccontextmanager
async def running(directory: Path, url: str) -> AsyncIterator[Replica]:
    path = directory / "catalogue.yaml"
    path.write_text(CATALOGUE.replace("KEY", "a" * 64).replace("id: off", 'id: "off"'))
    async with operated(directory, url, catalogue=str(path), store={"poll_ms": 60_000}) as one:
        yield one


async def shown(one: Replica) -> dict[str, str]:
    """Reason by connection, empty for an eligible one."""
    found = (await one.admin.ListCandidates(MIXED)).candidates
    assert all(each.eligible == (not each.HasField("exclusion")) for each in found)
    return {each.target.connection: each.exclusion.reason_text for each in found}


async def test_every_account_of_a_route_is_listed_in_configured_order_with_what_excludes_it(
    tmp_path: Path, embedded_url: str
) -> None:
    async with running(tmp_path, embedded_url) as one:
        assert (await one.admin.ListCandidates(MIXED)).strategy == "round-robin"
        assert await shown(one) == {"a": "", "b": "", "capped": "", "off": "disabled", "managed": "lease_hidden"}
        assert list(await shown(one)) == ["a", "b", "capped", "off", "managed"]
        report = await one.policy.ReportOutcome(outcome("a", 429, headers=[{"name": "Retry-After", "value": "60"}]))
        excluded = (await one.admin.ListCandidates(MIXED)).candidates[0].exclusion

        assert (excluded.reason_text, excluded.mechanism_text) == ("connection_cooldown", "connection_cooldown")
        assert 55_000 < excluded.remaining_ms <= 60_000
        assert excluded.evidence_id == report.effects[0].fact_id
        assert (await shown(one))["b"] == ""


async def test_a_cap_that_is_full_keeps_out_until_its_permit_ends(tmp_path: Path, embedded_url: str) -> None:
    async with running(tmp_path, embedded_url) as one:
        held = None
        while held is None or held.dispatch.target.connection != "capped":
            held = await one.policy.SelectTarget(ASK)
        (capped,) = [e for e in (await one.admin.ListCandidates(MIXED)).candidates if e.target.connection == "capped"]

        assert capped.exclusion.reason_text == "concurrency_cap"
        assert capped.exclusion.until_at_unix_ms == held.dispatch.permits[0].expires_at_unix_ms
        done = policy_pb2.ReportOutcomeRequest(
            decision_token=held.decision_token, target=held.dispatch.target, http_status=200, final=True
        )
        await one.policy.ReportOutcome(done)

        async def is_free() -> bool:
            return (await shown(one))["capped"] == ""

        await until(is_free)


async def test_a_listing_touches_nothing(tmp_path: Path, embedded_url: str) -> None:
    async with running(tmp_path, embedded_url) as one:
        first = await one.policy.SelectTarget(ASK)
        version, statements = one.service.replica.view.version, one.service.store.statements
        for _ in range(50):
            await shown(one)

        assert one.service.replica.view.version == version
        assert one.service.store.statements - statements < 10  # the replica's signs of life go on
        picks = [(await one.policy.SelectTarget(ASK)).dispatch.target.connection for _ in range(3)]
        assert first.dispatch.target.connection == "a"
        assert picks == ["a", "a", "capped"]  # three in a row each: the listings in between did not turn the rotation


async def test_an_unknown_route_is_not_found_and_an_unnamed_one_refused(tmp_path: Path, embedded_url: str) -> None:
    async with running(tmp_path, embedded_url) as one:
        unknown = admin_pb2.ListCandidatesRequest(route="nowhere")
        info, _ = await refused(one.admin.ListCandidates(unknown), grpc.StatusCode.NOT_FOUND)
        _, fields = await refused(
            one.admin.ListCandidates(admin_pb2.ListCandidatesRequest()), grpc.StatusCode.INVALID_ARGUMENT
        )

        assert info.reason == "NOT_FOUND"
        assert list(fields) == ["route"]
