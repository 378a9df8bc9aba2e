"""Operators over real gRPC and real Postgres: what one replica is told, every replica does."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from policy_service.bootstrap import RELEASE
from policy_service.generated.policy.v1 import admin_pb2, permit_pb2, policy_pb2, types_pb2
from policy_service.transport.grpc.admin_servicer import SERVICE
from tests.integration.operating import (
    becomes,
    first_probe,
    open_breaker,
    operated,
    refusal,
    refused,
    settings_patch,
    two,
    until,
)
from tests.integration.serving import outcome, selection

ALICE = admin_pb2.Actor(name="alice", note="drill")
BANNED = b'{"error": {"message": "Your account has been deactivated"}}'
BUILT = (
    admin_pb2.RESET_SCOPE_BREAKERS,
    admin_pb2.RESET_SCOPE_PROVIDER_COOLDOWNS,
    admin_pb2.RESET_SCOPE_CONNECTION_COOLDOWNS,
    admin_pb2.RESET_SCOPE_TERMINAL_STATES,
    admin_pb2.RESET_SCOPE_MODEL_LOCKOUTS,
)
UNKNOWN, NEWER = admin_pb2.RESET_SCOPE_UNSPECIFIED, cast("admin_pb2.ResetScope.ValueType", 99)
ANSWERED = {
    "SetBreakerControl",
    "ListBreakers",
    "ResetState",
    "ListModelCooldowns",
    "ClearModelCooldown",
    "ListState",
    "SetConnectionEnabled",
    "CredentialChanged",
    "NextCredentialRetry",
    "ReportCredentialResult",
    "ImportCatalogue",
    "GetCatalogue",
    "LintRules",
    "GetSettings",
    "PatchSettings",
    "GetHealth",
    "ListCandidates",
    "ListFacts",
    "Explain",
    "ClassifyOutcome",
}


# -- breakers ------------------------------------------------------------------------------------------------
async def test_force_open_beats_a_live_permit_of_another_replica(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        await one.admin.PatchSettings(settings_patch({"breaker": {"api_key": {"reset_timeout_ms": 1000}}}))

        async def follows() -> bool:
            return another.service.replica.view.policy.revision == 1

        await until(follows)
        await open_breaker(one)
        probe = await first_probe(another)
        assert [permit.gate for permit in probe.dispatch.permits] == ["openai"]
        control = admin_pb2.SetBreakerControlRequest(
            key="openai", control=admin_pb2.BREAKER_CONTROL_FORCE_OPEN, actor=ALICE
        )
        (shown,) = (await one.admin.SetBreakerControl(control)).breakers
        assert (shown.key, shown.control, shown.live_probes) == ("openai", admin_pb2.BREAKER_CONTROL_FORCE_OPEN, 0)
        assert await refusal(one, "z") == ["forced_open"]
        late = await another.policy.ReportOutcome(outcome("z", 200, decision_token=probe.decision_token))
        assert list(late.effects) == []
        await becomes(another, ["forced_open"], "z")
        again = await another.admin.SetBreakerControl(control)
        assert again.breakers[0].generation == shown.generation
        facts = (await one.admin.ListFacts(admin_pb2.ListFactsRequest(provider="openai", mechanism="breaker"))).facts
        assert [(f.actor, f.replica) for f in facts if f.reason == "force_open"] == [("alice (drill)", "one")]


async def test_the_history_of_a_breaker_is_its_newest_facts(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        await open_breaker(one)
        for _ in range(10):
            await one.admin.SetBreakerControl(
                admin_pb2.SetBreakerControlRequest(key="openai", control=admin_pb2.BREAKER_CONTROL_FORCE_OPEN)
            )
            await one.admin.SetBreakerControl(admin_pb2.SetBreakerControlRequest(key="openai"))
        request = admin_pb2.ListFactsRequest(provider="openai", mechanism="breaker", page_size=20)
        page = await one.admin.ListFacts(request)
        assert len(page.facts) == 20
        assert {(f.from_state, f.to_state) for f in page.facts} == {("OPEN", "force_open"), ("force_open", "OPEN")}
        request.page_token = page.next_page_token
        older = (await one.admin.ListFacts(request)).facts
        told = [(f.from_state, f.to_state, f.failure_count, f.reason) for f in older]
        assert told == [
            ("DEGRADED", "OPEN", 12, "failure_threshold"),
            ("CLOSED", "DEGRADED", 7, "degradation_threshold"),
        ]


async def test_reset_closes_and_clears_on_every_replica(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        await open_breaker(one)
        await one.policy.ReportOutcome(outcome("a", 401))
        await becomes(another, ["circuit_open"], "z")
        done = await one.admin.ResetState(admin_pb2.ResetStateRequest(actor=ALICE))
        assert done.reset_count == 1
        assert await refusal(one, "z") == []
        await becomes(another, [], "z")
        await becomes(another, ["expired"], "a")
        scopes = [admin_pb2.RESET_SCOPE_CONNECTION_COOLDOWNS, admin_pb2.RESET_SCOPE_TERMINAL_STATES]
        await another.admin.ResetState(admin_pb2.ResetStateRequest(scopes=scopes, provider="OpenAI"))
        await becomes(one, [], "a")
        assert list((await one.admin.ListBreakers(admin_pb2.ListBreakersRequest())).breakers) == []


async def test_every_scope_is_reset_and_an_unknown_one_is_named(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        known = [number for number in admin_pb2.ResetScope.values() if number]
        done = await one.admin.ResetState(admin_pb2.ResetStateRequest(scopes=known, actor=ALICE))
        assert done.reset_count == 0
        unknown = admin_pb2.ResetStateRequest(scopes=[UNKNOWN, NEWER], connection="\n")
        _, fields = await refused(one.admin.ResetState(unknown), grpc.StatusCode.INVALID_ARGUMENT)
        assert set(fields) == {"scopes[0]", "scopes[1]", "connection"}
        assert "terminal_states" in fields["scopes[1]"]


async def test_a_recovery_job_clears_only_what_is_still_as_it_saw_it(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        await one.policy.ReportOutcome(outcome("a", 429))
        (row,) = (await one.admin.ListState(admin_pb2.ListStateRequest(provider="openai", connection="a"))).rows
        seen = admin_pb2.ConnectionSeen(
            test_status=row.fields["test_status"],
            last_error_at_unix_ms=int(row.fields["last_error_at"]),
            rate_limited_until_unix_ms=int(row.fields["rate_limited_until"]),
        )
        job = admin_pb2.ResetStateRequest(
            scopes=[admin_pb2.RESET_SCOPE_CONNECTION_COOLDOWNS], provider="openai", connection="a", if_still=seen
        )
        await one.policy.ReportOutcome(outcome("a", 429, headers=[{"name": "Retry-After", "value": "900"}]))
        assert (await one.admin.ResetState(job)).reset_count == 0
        assert await refusal(one, "a") == ["connection_cooldown"]
        (row,) = (await one.admin.ListState(admin_pb2.ListStateRequest(provider="openai", connection="a"))).rows
        job.if_still.rate_limited_until_unix_ms = int(row.fields["rate_limited_until"])
        assert (await one.admin.ResetState(job)).reset_count == 1
        assert await refusal(one, "a") == []
        wrong = admin_pb2.ResetStateRequest(if_still=seen)
        _, fields = await refused(one.admin.ResetState(wrong), grpc.StatusCode.INVALID_ARGUMENT)
        assert set(fields) == {"provider", "connection", "scopes"}


# -- connections ---------------------------------------------------------------------------------------------
async def test_a_new_credential_ends_expired_and_older_calls_are_statistics(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        older = await another.policy.SelectTarget(selection("a", "b"))
        await one.policy.ReportOutcome(outcome("a", 401))
        await becomes(another, ["expired"], "a")
        request = admin_pb2.CredentialChangedRequest(provider="openai", connection="a", actor=ALICE)
        done = await one.admin.CredentialChanged(request)
        assert [(f.from_state, f.to_state, f.actor) for f in done.facts] == [("expired", "active", "alice (drill)")]
        late = await another.policy.ReportOutcome(outcome("a", 401, decision_token=older.decision_token))
        assert "stale_generation" in late.ignored_texts
        await becomes(another, [], "a")


async def test_a_banned_connection_is_revived_by_operator_or_credential_only(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        await one.policy.ReportOutcome(outcome("a", 403, body=BANNED))
        await one.policy.ReportOutcome(outcome("a", 200))
        everything_else = [scope for scope in BUILT if scope != admin_pb2.RESET_SCOPE_TERMINAL_STATES]
        await one.admin.ResetState(admin_pb2.ResetStateRequest(scopes=everything_else))
        assert (await one.admin.NextCredentialRetry(admin_pb2.NextCredentialRetryRequest())).permit_id == ""
        assert await refusal(one, "a") == ["banned"]
        await one.admin.ResetState(
            admin_pb2.ResetStateRequest(
                scopes=[admin_pb2.RESET_SCOPE_TERMINAL_STATES], provider="openai", connection="a"
            )
        )
        assert await refusal(one, "a") == []
        await one.policy.ReportOutcome(outcome("a", 403, body=BANNED))
        await one.admin.CredentialChanged(admin_pb2.CredentialChangedRequest(provider="openai", connection="a"))
        assert await refusal(one, "a") == []


async def test_a_connection_is_switched_off_and_on_for_the_fleet(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        switch = admin_pb2.SetConnectionEnabledRequest(provider="openai", connection="a", actor=ALICE)
        assert (await one.admin.SetConnectionEnabled(switch)).changed
        assert not (await one.admin.SetConnectionEnabled(switch)).changed
        await becomes(another, ["disabled"], "a")
        switch.enabled = True
        assert (await another.admin.SetConnectionEnabled(switch)).generation == 2
        await becomes(one, [], "a")


async def test_one_gateway_revives_an_expired_connection(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        await one.policy.ReportOutcome(outcome("a", 401))
        await becomes(another, ["expired"], "a")
        ask = admin_pb2.NextCredentialRetryRequest(providers=["openai"])
        answers = await asyncio.gather(*(each.admin.NextCredentialRetry(ask) for each in (one, another) * 3))
        (task,) = [answer for answer in answers if answer.permit_id]
        assert (task.task, task.connection) == (admin_pb2.CREDENTIAL_TASK_RETRY_EXPIRED, "a")
        failed = admin_pb2.ReportCredentialResultRequest(permit_id=task.permit_id, http_status=400)
        for each in (one, another):
            result = await each.admin.ReportCredentialResult(failed)
            assert (result.state, result.attempts_left) == ("expired", 2)
        assert 0 < (await one.admin.NextCredentialRetry(ask)).next_due_ms <= 60_000
        failed.permit_id = "x.y"
        await refused(one.admin.ReportCredentialResult(failed), grpc.StatusCode.NOT_FOUND)


async def test_a_locked_model_is_listed_and_cleared_everywhere(tmp_path: Path, embedded_url: str) -> None:
    def limited(connection: str) -> policy_pb2.ReportOutcomeRequest:
        report = outcome(connection, 429)
        report.target.CopyFrom(types_pb2.Target(provider="gemini", connection=connection, model="flash"))
        return report

    async with two(tmp_path, embedded_url) as (one, another):
        await one.policy.ReportOutcome(limited("a"))
        await one.policy.ReportOutcome(limited("b"))
        (item,) = (await one.admin.ListModelCooldowns(admin_pb2.ListModelCooldownsRequest(connection="a"))).items
        assert (item.provider, item.model, item.failure_count) == ("gemini", "flash", 1)
        assert item.remaining_ms > 0
        clear = admin_pb2.ClearModelCooldownRequest(provider="gemini", connection="a", model="flash", actor=ALICE)
        assert (await another.admin.ClearModelCooldown(clear)).removed == 1
        assert (await another.admin.ClearModelCooldown(clear)).removed == 0
        assert (await one.admin.ClearModelCooldown(admin_pb2.ClearModelCooldownRequest(all=True))).removed == 1

        async def is_clear() -> bool:
            return not (await another.admin.ListModelCooldowns(admin_pb2.ListModelCooldownsRequest())).items

        await until(is_clear)
        nothing = admin_pb2.ClearModelCooldownRequest(connection="a")
        _, fields = await refused(one.admin.ClearModelCooldown(nothing), grpc.StatusCode.INVALID_ARGUMENT)
        assert set(fields) == {"provider", "model"}


# -- catalogue and settings ----------------------------------------------------------------------------------
async def test_an_import_is_whole_and_reaches_every_replica(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        document = "connections: [{id: a, provider: openai, enabled: false}]"
        done = await one.admin.ImportCatalogue(admin_pb2.ImportCatalogueRequest(document=document, actor=ALICE))
        assert (done.revision, done.changed) == (1, True)
        assert await refusal(one, "a") == ["disabled"]
        await becomes(another, ["disabled"], "a")
        for known in (document, f"# the same\n{document}"):
            again = await another.admin.ImportCatalogue(admin_pb2.ImportCatalogueRequest(document=known))
            assert (again.revision, again.changed) == (1, False)
        shown = await another.admin.GetCatalogue(admin_pb2.GetCatalogueRequest(revision=1))
        assert json.loads(shown.document)["connections"][0]["id"] == "a"
        facts = await one.admin.ListFacts(admin_pb2.ListFactsRequest(mechanism="catalogue"))
        assert [(fact.to_state, fact.actor) for fact in facts.facts] == [("1", "alice (drill)")]


async def test_an_invalid_catalogue_changes_nothing(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        request = admin_pb2.ImportCatalogueRequest(document="connections: [{id: a}, {provider: x}]\nroutes: 3")
        info, fields = await refused(one.admin.ImportCatalogue(request), grpc.StatusCode.INVALID_ARGUMENT)
        assert info.reason == "CATALOGUE_INVALID"
        assert set(fields) == {"connections[0].provider", "connections[1].id", "routes"}
        await refused(one.admin.GetCatalogue(admin_pb2.GetCatalogueRequest()), grpc.StatusCode.NOT_FOUND)
        assert one.service.replica.view.policy.revision == 0
        lint = admin_pb2.LintRulesRequest(document="rules: [{provider: x, status: 418, match: tea, scope: model}]")
        found = (await one.admin.LintRules(lint)).warnings
        assert {"no_path", "unknown_provider"} <= {each.problem for each in found}


async def test_two_patches_of_different_fields_both_survive(tmp_path: Path, embedded_url: str) -> None:
    async with two(tmp_path, embedded_url) as (one, another):
        patches: list[dict[str, Any]] = [
            {"connection.api_key.base_cooldown_ms": 1},
            {"tools": {"max_limit": 77}},
            {"breaker.half_open_probes": 3},
            {"breaker.successes_to_close": 2},
        ]
        calls = (
            each.admin.PatchSettings(settings_patch(patch))
            for each, patch in zip((one, another) * 2, patches, strict=True)
        )
        assert {answer.version for answer in await asyncio.gather(*calls)} <= {1, 2, 3, 4}

        async def follows() -> bool:
            return bool((await one.admin.GetSettings(admin_pb2.GetSettingsRequest())).version == len(patches))

        await until(follows)
        answer = await one.admin.GetSettings(admin_pb2.GetSettingsRequest(with_sources=True))
        stored = {each.name: each.value.number_value for each in answer.settings if each.source == "stored"}
        assert stored == {
            "connection.api_key.base_cooldown_ms": 1,
            "tools.max_limit": 77,
            "breaker.half_open_probes": 3,
            "breaker.successes_to_close": 2,
        }
        stale = settings_patch({"tools": {"max_limit": 5}}, if_version=3)
        info, _ = await refused(one.admin.PatchSettings(stale), grpc.StatusCode.ABORTED)
        assert (info.reason, info.metadata["version"]) == ("SETTINGS_VERSION_MISMATCH", "4")
        wrong = settings_patch({"tools": {"max_limit": 0.5}, "nope": True})
        _, fields = await refused(one.admin.PatchSettings(wrong), grpc.StatusCode.INVALID_ARGUMENT)
        assert set(fields) == {"tools.max_limit", "nope"}


# -- reading -------------------------------------------------------------------------------------------------
async def test_facts_say_why_each_account_is_out(tmp_path: Path, embedded_url: str) -> None:
    """A cooldown without a cause: three of four accounts blocked, and for each the rule, evidence, replica, request."""
    async with operated(tmp_path, embedded_url) as one:
        for connection, status in (("a", 429), ("b", 503), ("c", 402)):
            decided = await one.policy.SelectTarget(selection(connection, request_id=f"request-{connection}"))
            await one.policy.ReportOutcome(outcome(connection, status, decision_token=decided.decision_token))
        answer = await one.policy.SelectTarget(selection("a", "b", "c", "d", explain=True))
        assert answer.dispatch.target.connection == "d"
        assert [each.target.connection for each in answer.exclusions] == ["a", "b", "c"]
        for excluded in answer.exclusions:
            connection = excluded.target.connection
            request = admin_pb2.ListFactsRequest(provider="openai", connection=connection)
            facts = {fact.id: fact for fact in (await one.admin.ListFacts(request)).facts}
            fact = facts[excluded.evidence_id]
            assert (fact.replica, fact.request_id) == ("one", f"request-{connection}")
            assert fact.status in (429, 503, 402)
            assert fact.reason
            assert fact.rule
            assert fact.deadline_at_unix_ms == excluded.until_at_unix_ms
            told = await one.admin.Explain(admin_pb2.ExplainRequest(decision_id=fact.decision_id))
            assert fact.id in {each.id for each in told.facts}
        await refused(one.admin.Explain(admin_pb2.ExplainRequest(decision_id="gone")), grpc.StatusCode.NOT_FOUND)


async def test_state_is_listed_page_by_page(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        for connection in "abc":
            await one.policy.ReportOutcome(outcome(connection, 429))
        found: list[admin_pb2.StateRow] = []
        request = admin_pb2.ListStateRequest(provider="openai", page_size=2)
        while True:
            page = await one.admin.ListState(request)
            found += page.rows
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        assert [(row.connection, row.state) for row in found] == [("a", "cooling"), ("b", "cooling"), ("c", "cooling")]
        assert {row.mechanism_text for row in found} == {"connection_cooldown"}
        assert found[0].fields["test_status"] == "unavailable"
        assert found[0].fields["health_score"] == 40
        wrong = admin_pb2.ListStateRequest(page_token="?", page_size=-1)
        _, fields = await refused(one.admin.ListState(wrong), grpc.StatusCode.INVALID_ARGUMENT)
        assert set(fields) == {"page_token", "page_size"}


async def test_an_outcome_is_classified_without_a_trace(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        failed = outcome("a", 429, headers=[{"name": "Retry-After", "value": "60"}])
        failed.ClearField("report_id")
        answer = await one.admin.ClassifyOutcome(admin_pb2.ClassifyOutcomeRequest(outcome=failed))
        assert (answer.verdict.reason_text, answer.fallback, answer.cooldown_ms) == ("rate_limit", True, 60_000)
        assert (answer.breaker_kind, answer.reason_label) == ("rate_limit", "rate_limit_exceeded")
        assert await refusal(one, "a") == []
        empty = admin_pb2.ClassifyOutcomeRequest()
        _, fields = await refused(one.admin.ClassifyOutcome(empty), grpc.StatusCode.INVALID_ARGUMENT)
        assert "outcome" in fields


async def test_health_says_what_is_wrong(tmp_path: Path, embedded_url: str) -> None:
    async with operated(tmp_path, embedded_url) as one:
        await open_breaker(one)
        slot = permit_pb2.AcquirePermitRequest(gates=[permit_pb2.Gate(key="g", limit=2)], request_id="q")
        await one.policy.AcquirePermit(slot)
        seen = await one.admin.GetHealth(admin_pb2.GetHealthRequest())
        assert (seen.active_leases, seen.held_permits, seen.waiting_permits, seen.active_lanes) == (0, 1, 0, 0)
        assert (seen.status, seen.replica, seen.version) == (admin_pb2.HEALTH_STATUS_OK, "one", RELEASE)
        assert [(each.replica, each.version) for each in seen.replicas] == [("one", RELEASE)]
        repeated = outcome("r", 400, report_id="again")
        for _ in range(2):
            await one.policy.ReportOutcome(repeated)
        again = await one.admin.GetHealth(admin_pb2.GetHealthRequest())
        assert again.ignored_reports["duplicate"] == seen.ignored_reports.get("duplicate", 0) + 1
        assert seen.database.reachable
        assert seen.database.HasField("latency_ms")
        assert [(each.key, each.state_text) for each in seen.breakers] == [("openai", "OPEN")]


# -- keys ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", sorted(ANSWERED))
def test_every_operation_is_one_of_the_contract(method: str) -> None:
    assert method in SERVICE.methods_by_name


async def test_admin_calls_need_the_admin_scope_and_name_the_key(tmp_path: Path, embedded_url: str) -> None:
    def hashed(key: str) -> str:
        return hashlib.sha256(key.encode()).hexdigest()

    def bearer(key: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {key}"),)

    auth = {"keys": [f"sha256:{hashed('caller')}"], "admin_keys": [f"sha256:{hashed('operator')}"]}
    async with operated(tmp_path, embedded_url, auth=auth) as one:
        for name in ANSWERED:
            call: Callable[..., Any] = getattr(one.admin, name)
            request = getattr(admin_pb2, f"{name}Request")()
            await refused(call(request), grpc.StatusCode.UNAUTHENTICATED)
            await refused(call(request, metadata=bearer("caller")), grpc.StatusCode.PERMISSION_DENIED)
        operator = bearer("operator")
        control = admin_pb2.SetBreakerControlRequest(key="openai", control=admin_pb2.BREAKER_CONTROL_DISABLE)
        await one.admin.SetBreakerControl(control, metadata=operator)
        facts = (await one.admin.ListFacts(admin_pb2.ListFactsRequest(), metadata=operator)).facts
        assert [fact.actor for fact in facts] == [f"admin-key-{hashed('operator')[:8]}"]
