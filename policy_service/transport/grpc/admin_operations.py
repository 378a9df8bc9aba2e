"""Operations of AdminService by method name: read the request, run the use case, write the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policy_service.application.admin_candidates import Candidates
from policy_service.application.admin_catalogue import CatalogueAdmin
from policy_service.application.admin_credentials import CredentialAdmin
from policy_service.application.admin_health import FactsAdmin, HealthAdmin
from policy_service.application.admin_listings import Listings
from policy_service.application.admin_state import StateAdmin
from policy_service.application.ports import Clock
from policy_service.application.report_outcome import ReportOutcome
from policy_service.generated.policy.v1 import admin_pb2
from policy_service.transport.grpc.gate import Unary
from policy_service.transport.grpc.limits import MAX_REQUEST_ID_CHARS, Problems
from policy_service.transport.grpc.mapping import Reading, admin_answer, admin_request
from policy_service.transport.grpc.mapping.reading import optional
from policy_service.transport.grpc.mapping.report_answer import verdict

MAX_STATE_ROWS = 10_000
MAX_FACTS = 1_000


@dataclass(frozen=True, slots=True)
class AdminUseCases:
    """What operators may ask of one replica."""

    state: StateAdmin
    listings: Listings
    candidates: Candidates
    credentials: CredentialAdmin
    catalogue: CatalogueAdmin
    health: HealthAdmin
    facts: FactsAdmin
    report: ReportOutcome
    clock: Clock
    release: str


def admin_operations(cases: AdminUseCases, reading: Reading) -> Mapping[str, Unary]:
    """Every operation that this release answers."""
    return {
        **_StateOperations(cases).by_name(),
        **_CredentialOperations(cases).by_name(),
        **_CatalogueOperations(cases).by_name(),
        **_ReadOperations(cases, reading).by_name(),
    }


class _StateOperations:
    def __init__(self, cases: AdminUseCases) -> None:
        self._state = cases.state
        self._listings = cases.listings

    def by_name(self) -> dict[str, Unary]:
        return {
            "SetBreakerControl": self.set_breaker_control,
            "ListBreakers": self.list_breakers,
            "ResetState": self.reset_state,
            "ListModelCooldowns": self.list_model_cooldowns,
            "ClearModelCooldown": self.clear_model_cooldown,
            "ListState": self.list_state,
            "SetConnectionEnabled": self.set_connection_enabled,
        }

    async def set_breaker_control(
        self, message: admin_pb2.SetBreakerControlRequest
    ) -> admin_pb2.SetBreakerControlResponse:
        problems = admin_request.ids(message, "key")
        control, actor = (
            admin_request.breaker_control(message, problems),
            admin_request.actor(message.actor, problems),
        )
        problems.settle()
        if message.all:
            changed = await self._state.reset_breakers(actor)
        else:
            changed = (await self._state.control_breaker(message.key, control, actor),)
        return admin_pb2.SetBreakerControlResponse(breakers=map(admin_answer.breaker, changed))

    async def list_breakers(self, message: admin_pb2.ListBreakersRequest) -> admin_pb2.ListBreakersResponse:
        admin_request.ids(message, "provider").settle()
        found = self._listings.breakers(message.provider)
        return admin_pb2.ListBreakersResponse(breakers=map(admin_answer.breaker, found))

    async def reset_state(self, message: admin_pb2.ResetStateRequest) -> admin_pb2.ResetStateResponse:
        problems = admin_request.ids(message, "provider", "connection")
        scopes, actor = (
            admin_request.reset_scopes(message, problems),
            admin_request.actor(message.actor, problems),
        )
        seen = admin_request.connection_seen(message, scopes, problems)
        problems.settle()
        if seen is not None:
            applied = await self._state.recover(message.provider, message.connection, seen, actor)
            done = "cleared" if applied else "no longer as it was seen; nothing changed"
            return admin_pb2.ResetStateResponse(reset_count=int(applied), message=done)
        count = await self._state.reset(scopes, message.provider, message.connection, actor)
        return admin_pb2.ResetStateResponse(reset_count=count, message=f"{', '.join(scopes)}: {count} rows reset")

    async def list_model_cooldowns(
        self, message: admin_pb2.ListModelCooldownsRequest
    ) -> admin_pb2.ListModelCooldownsResponse:
        admin_request.ids(message, "provider", "connection").settle()
        found = self._listings.model_cooldowns(message.provider, message.connection)
        return admin_pb2.ListModelCooldownsResponse(items=map(admin_answer.model_cooldown, found))

    async def clear_model_cooldown(
        self, message: admin_pb2.ClearModelCooldownRequest
    ) -> admin_pb2.ClearModelCooldownResponse:
        problems = admin_request.ids(message, "provider", "connection", "model")
        actor = admin_request.actor(message.actor, problems)
        if not message.all:
            admin_request.needs(message, problems, "provider", "model")
        elif message.provider or message.connection or message.model:
            problems.add("all", "set together with a target", "one of the two")
        problems.settle()
        if message.all:
            removed = await self._state.clear_all_model_locks(actor)
        else:
            removed = await self._state.clear_model_lock(message.provider, message.connection, message.model, actor)
        return admin_pb2.ClearModelCooldownResponse(removed=removed)

    async def list_state(self, message: admin_pb2.ListStateRequest) -> admin_pb2.ListStateResponse:
        problems = admin_request.ids(message, "provider", "connection")
        size = admin_request.page_size(message.page_size, 1_000, MAX_STATE_ROWS, problems)
        after = admin_request.read_place(message.page_token, problems)
        problems.settle()
        return admin_answer.state_page(self._listings.state(size, message.provider, message.connection, after))

    async def set_connection_enabled(
        self, message: admin_pb2.SetConnectionEnabledRequest
    ) -> admin_pb2.SetConnectionEnabledResponse:
        problems = admin_request.ids(message, "provider", "connection")
        admin_request.needs(message, problems, "provider", "connection")
        actor = admin_request.actor(message.actor, problems)
        problems.settle()
        row, changed = await self._state.set_enabled(message.provider, message.connection, message.enabled, actor)
        return admin_pb2.SetConnectionEnabledResponse(generation=row.generation, changed=changed)


class _CredentialOperations:
    def __init__(self, cases: AdminUseCases) -> None:
        self._state = cases.state
        self._credentials = cases.credentials

    def by_name(self) -> dict[str, Unary]:
        return {
            "CredentialChanged": self.credential_changed,
            "NextCredentialRetry": self.next_credential_retry,
            "ReportCredentialResult": self.report_credential_result,
        }

    async def credential_changed(
        self, message: admin_pb2.CredentialChangedRequest
    ) -> admin_pb2.CredentialChangedResponse:
        problems = admin_request.ids(message, "provider", "connection")
        admin_request.needs(message, problems, "provider", "connection")
        expires_at = admin_request.instant(message, "token_expires_at_unix_ms", problems)
        actor = admin_request.actor(message.actor, problems)
        problems.settle()
        done = await self._state.change_credential(message.provider, message.connection, expires_at, actor)
        return admin_pb2.CredentialChangedResponse(
            generation=done.value.generation, facts=map(admin_answer.fact, done.facts)
        )

    async def next_credential_retry(
        self, message: admin_pb2.NextCredentialRetryRequest
    ) -> admin_pb2.NextCredentialRetryResponse:
        problems = Problems()
        problems.count("providers", len(message.providers), admin_request.MAX_PROVIDERS)
        for index, provider in enumerate(message.providers):
            problems.text(f"providers[{index}]", provider)
        problems.settle()
        found = await self._credentials.next_retry(message.providers)
        task = admin_pb2.CREDENTIAL_TASK_RETRY_EXPIRED if found.permit_id else admin_pb2.CREDENTIAL_TASK_UNSPECIFIED
        return admin_pb2.NextCredentialRetryResponse(
            task=task,
            permit_id=found.permit_id,
            provider=found.provider,
            connection=found.connection,
            attempts=found.attempts,
            next_due_ms=found.next_due_ms,
            test_token_first=found.test_token_first,
        )

    async def report_credential_result(
        self, message: admin_pb2.ReportCredentialResultRequest
    ) -> admin_pb2.ReportCredentialResultResponse:
        problems = Problems()
        problems.text("permit_id", message.permit_id, admin_request.MAX_PERMIT_CHARS)
        admin_request.needs(message, problems, "permit_id")
        problems.between("http_status", optional(message, "http_status"), 100, 999)
        expires_at = admin_request.instant(message, "token_expires_at_unix_ms", problems)
        problems.settle()
        result = await self._credentials.report(
            message.permit_id, succeeded=message.success, token_expires_at=expires_at
        )
        return admin_pb2.ReportCredentialResultResponse(state=result.state, attempts_left=result.attempts_left)


class _CatalogueOperations:
    def __init__(self, cases: AdminUseCases) -> None:
        self._catalogue = cases.catalogue

    def by_name(self) -> dict[str, Unary]:
        return {
            "ImportCatalogue": self.import_catalogue,
            "GetCatalogue": self.get_catalogue,
            "LintRules": self.lint_rules,
            "GetSettings": self.get_settings,
            "PatchSettings": self.patch_settings,
        }

    async def import_catalogue(self, message: admin_pb2.ImportCatalogueRequest) -> admin_pb2.ImportCatalogueResponse:
        problems = Problems()
        admin_request.needs(message, problems, "document")
        actor = admin_request.actor(message.actor, problems)
        problems.settle()
        done = await self._catalogue.import_document(
            message.document, actor, force=message.force, dry_run=message.dry_run
        )
        return admin_pb2.ImportCatalogueResponse(
            revision=done.revision, changed=done.changed, warnings=map(admin_answer.warning, done.warnings)
        )

    async def get_catalogue(self, message: admin_pb2.GetCatalogueRequest) -> admin_pb2.GetCatalogueResponse:
        problems = Problems()
        revision = optional(message, "revision")
        problems.between("revision", revision, 1, 2**53 - 1)
        problems.settle()
        found = await self._catalogue.document(revision)
        return admin_pb2.GetCatalogueResponse(
            revision=found.revision,
            document=found.document,
            created_at_unix_ms=found.created_at,
            sha256=found.sha256,
        )

    async def lint_rules(self, message: admin_pb2.LintRulesRequest) -> admin_pb2.LintRulesResponse:
        found = await self._catalogue.lint_rules(message.document)
        return admin_pb2.LintRulesResponse(warnings=map(admin_answer.warning, found))

    async def get_settings(self, message: admin_pb2.GetSettingsRequest) -> admin_pb2.GetSettingsResponse:
        return admin_answer.settings(self._catalogue.settings(), with_sources=message.with_sources)

    async def patch_settings(self, message: admin_pb2.PatchSettingsRequest) -> admin_pb2.PatchSettingsResponse:
        problems = Problems()
        body = admin_request.patch_body(message, problems)
        actor = admin_request.actor(message.actor, problems)
        problems.settle()
        done = await self._catalogue.patch_settings(body, actor, optional(message, "if_version"))
        settings = admin_answer.wire_settings(done.settings, with_sources=False)
        return admin_pb2.PatchSettingsResponse(settings=settings, version=done.version)


class _ReadOperations:
    def __init__(self, cases: AdminUseCases, reading: Reading) -> None:
        self._cases = cases
        self._reading = reading

    def by_name(self) -> dict[str, Unary]:
        return {
            "GetHealth": self.get_health,
            "ListCandidates": self.list_candidates,
            "ListFacts": self.list_facts,
            "Explain": self.explain,
            "ClassifyOutcome": self.classify_outcome,
        }

    async def get_health(self, message: admin_pb2.GetHealthRequest) -> admin_pb2.GetHealthResponse:
        return admin_answer.health(await self._cases.health.health(), self._cases.release)

    async def list_candidates(self, message: admin_pb2.ListCandidatesRequest) -> admin_pb2.ListCandidatesResponse:
        problems = admin_request.ids(message, "route")
        admin_request.needs(message, problems, "route")
        problems.settle()
        return admin_answer.candidates(self._cases.candidates.of_route(message.route))

    async def list_facts(self, message: admin_pb2.ListFactsRequest) -> admin_pb2.ListFactsResponse:
        problems = admin_request.ids(message, "provider", "connection", "decision_id", "mechanism")
        size = admin_request.page_size(message.page_size, 100, MAX_FACTS, problems)
        before = admin_request.fact_token(message.page_token, problems)
        problems.settle()
        page = await self._cases.facts.list_facts(
            size,
            provider=message.provider,
            connection=message.connection,
            decision_id=message.decision_id,
            mechanism=message.mechanism,
            before_id=before,
        )
        token = "" if page.before_id is None else str(page.before_id)
        return admin_pb2.ListFactsResponse(facts=map(admin_answer.fact, page.facts), next_page_token=token)

    async def explain(self, message: admin_pb2.ExplainRequest) -> admin_pb2.ExplainResponse:
        problems = Problems()
        problems.text("decision_id", message.decision_id, MAX_REQUEST_ID_CHARS)
        admin_request.needs(message, problems, "decision_id")
        problems.settle()
        found = await self._cases.facts.explain(message.decision_id)
        return admin_pb2.ExplainResponse(facts=map(admin_answer.fact, found))

    async def classify_outcome(self, message: admin_pb2.ClassifyOutcomeRequest) -> admin_pb2.ClassifyOutcomeResponse:
        problems = Problems()
        observed = admin_request.instant(message, "observed_at_unix_ms", problems)
        problems.settle()
        request = admin_request.classified(message, self._reading)
        at = self._cases.clock.now() if observed is None else observed
        found = self._cases.report.preview(request, at)
        return admin_pb2.ClassifyOutcomeResponse(
            verdict=verdict(found.verdict),
            fallback=found.result.fallback,
            cooldown_ms=found.result.cooldown_ms,
            breaker_kind=found.breaker_kind,
            reason_label=found.reason_label,
        )
