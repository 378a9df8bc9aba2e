"""The operators' part of one process: use cases over its replica, documents by the settings' rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from policy_service.application.admin import Acts
from policy_service.application.admin_candidates import Candidates
from policy_service.application.admin_catalogue import (
    CatalogueAdmin,
    DocumentPatch,
    Documents,
    PatchedDocument,
    ReadCatalogue,
    RuleWarning,
    Setting,
)
from policy_service.application.admin_credentials import CredentialAdmin
from policy_service.application.admin_health import FactsAdmin, HealthAdmin
from policy_service.application.admin_listings import Listings
from policy_service.application.admin_owned import OwnedState
from policy_service.application.admin_state import StateAdmin
from policy_service.application.entropy import SystemEntropy
from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.lease_offers import ConnectionOffers
from policy_service.application.lease_upkeep import LeaseAdmin
from policy_service.application.leases import Leases
from policy_service.application.probe_permits import ProbePermits
from policy_service.application.replica import Replica
from policy_service.domain.policy import Policy
from policy_service.settings.catalogue_file import LoadedCatalogue, load_catalogue
from policy_service.settings.patch import NAME_TREE, REST_TREE, Tree, patch_document
from policy_service.settings.problems import ConfigError, Problem
from policy_service.settings.resolved import plain, resolve_all
from policy_service.transport.grpc.admin_operations import AdminUseCases
from policy_service.transport.grpc.gate import Unary
from policy_service.transport.grpc.lease_methods import lease_admin_operations, lease_methods
from policy_service.transport.grpc.mapping import Reading
from policy_service.transport.grpc.permit_methods import PermitMethods

CATALOGUE_INVALID = "CATALOGUE_INVALID"


def admin_use_cases(
    replica: Replica, environment: Mapping[str, str], spooled: Callable[[], int], release: str
) -> AdminUseCases:
    """The operators' use cases over one replica.

    Args:
        environment: variables of policy settings.
        spooled: number of reports that wait in the spool.
        release: version of the service.
    """
    name, view, clock = replica.settings.name, replica.view, replica.clock
    acts = Acts(replica.store, view, SystemEntropy(), name)
    listings = Listings(view, clock)
    return AdminUseCases(
        state=StateAdmin(acts, view, OwnedState(view, replica.pins, replica.permits)),
        listings=listings,
        candidates=Candidates(view, clock, replica.registry, replica.permits.loads, name),
        credentials=CredentialAdmin(acts, view, clock),
        catalogue=CatalogueAdmin(replica.store, view, documents(environment), replica.refresh, name),
        health=HealthAdmin(
            replica.store,
            view,
            clock,
            listings,
            replica.freshness,
            name,
            spooled,
            replica.follower.convergence.summary,
            replica.leases,
            replica.permits,
            lambda: replica.liveness.sightings,
            lambda: replica.report.ignored,
        ),
        facts=FactsAdmin(replica.store, view),
        report=replica.report,
        clock=clock,
        release=release,
    )


def documents(environment: Mapping[str, str]) -> Documents:
    """How documents and settings are read, for the use cases."""

    def read(text: str) -> ReadCatalogue:
        try:
            return _read(load_catalogue(text, source="document", environment=environment))
        except ConfigError as error:
            raise refused(error, CATALOGUE_INVALID) from error

    return Documents(read, patch_by(NAME_TREE), resolved_settings)


def patch_by(tree: Tree) -> DocumentPatch:
    """Reader of patches whose names are those of `tree`."""

    def patch(document: str | None, body: object) -> PatchedDocument:
        try:
            return PatchedDocument(*patch_document(document, body, tree))
        except ConfigError as error:
            raise refused(error) from error

    return patch


patch_by_rest_names = patch_by(REST_TREE)
"""Reader of patches that use the names below /api/resilience."""


def resolved_settings(policy: Policy) -> Sequence[Setting]:
    """Every setting in force, by name."""
    found = resolve_all(policy.sources)
    return [Setting(name, plain(found[name].value), found[name].source) for name in sorted(found)]


def refused(error: ConfigError, reason: str = "") -> InvalidRequestError:
    """The problems of a document or patch as those of a call."""
    return InvalidRequestError(tuple(_field_problem(each, reason) for each in error.problems), reason=reason)


def _field_problem(problem: Problem, reason: str) -> FieldProblem:
    given = f"{problem.problem}: {problem.given}" if problem.given else problem.problem
    allowed = f"allowed: {problem.allowed}" if problem.allowed else ""
    remedy = "; ".join(part for part in (allowed, problem.remedy, problem.where) if part)
    return FieldProblem(problem.path, given, remedy, reason or "INVALID_FIELD")


def _read(loaded: LoadedCatalogue) -> ReadCatalogue:
    warnings = tuple(RuleWarning(each.path, "", each.problem, each.text()) for each in loaded.warnings)
    return ReadCatalogue(loaded.catalogue, loaded.document_json, loaded.sha256, warnings)


def ownership_methods(replica: Replica, reading: Reading) -> tuple[dict[str, Unary], dict[str, Unary]]:
    """Methods of PolicyService and of AdminService for leases and permits."""
    offers = ConnectionOffers(replica.view, replica.clock, replica.settings.name)
    leases = Leases(replica.registry, replica.leases, offers, replica.lease_returns)
    probes = ProbePermits(replica.store, replica.view)
    permits = PermitMethods(replica.permits, lambda: replica.view.policy, reading, probes)
    policy = {**lease_methods(leases, reading), **permits.policy_methods()}
    return policy, {**lease_admin_operations(LeaseAdmin(replica.leases)), **permits.admin_methods()}
