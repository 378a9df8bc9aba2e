"""Catalogue and stored settings: each change is a new revision of the whole document, or nothing
(spec/operator_surface.md section 3, spec/restatement_and_rules.md section 6).

Stored settings are the `settings` block of the document, so an imported document replaces them too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policy_service.application.admin import Actor, store_lost
from policy_service.application.errors import NotFoundError, OverloadedError, VersionMismatchError
from policy_service.application.ports import (
    CatalogueRevision,
    RevisionMismatchError,
    Store,
    StoreUnavailableError,
)
from policy_service.application.view import View
from policy_service.domain.catalogue import Catalogue
from policy_service.domain.facts import Fact
from policy_service.domain.ids import DurationMs
from policy_service.domain.policy import Policy
from policy_service.domain.rule_linter import lint

MECHANISM = "catalogue"
STORE_MS: DurationMs = 5_000
PATCH_TRIES = 50
"""Patches of others that may come in between before a patch gives up."""
_SECRET = "key_sha256"


class RuleWarning(NamedTuple):
    """Something about a document that does not keep it from being used."""

    path: str
    rule_id: str
    problem: str
    message: str


@dataclass(frozen=True, slots=True)
class ReadCatalogue:
    """A document that may be used."""

    catalogue: Catalogue
    document: str
    """Canonical form, which is stored."""
    sha256: str
    warnings: tuple[RuleWarning, ...] = ()


class PatchedDocument(NamedTuple):
    """A document with its settings changed; `changed` names those that differ."""

    document: str
    changed: tuple[str, ...]


class Setting(NamedTuple):
    """One setting in force."""

    name: str
    value: Any
    source: str


DocumentPatch = Callable[[str | None, object], PatchedDocument]
"""(document or None, body) to the document with its settings patched."""


@dataclass(frozen=True, slots=True)
class Documents:
    """What is known about documents and settings outside the use cases.

    `read` and `patch` raise InvalidRequestError with everything that is wrong.
    """

    read: Callable[[str], ReadCatalogue]
    patch: DocumentPatch
    resolve: Callable[[Policy], Sequence[Setting]]


class Imported(NamedTuple):
    """Result of an import. `changed` False: the document was known, or it was only checked."""

    revision: int
    changed: bool
    warnings: tuple[RuleWarning, ...]


class Settings(NamedTuple):
    """Settings in force under the version that a conditional patch names."""

    settings: Sequence[Setting]
    version: int


class CatalogueAdmin:
    """Reads and replaces the document.

    Args:
        follow: makes this replica follow the newest revision.
        replica: name of this replica, recorded in the facts.
    """

    def __init__(
        self, store: Store, view: View, documents: Documents, follow: Callable[[], Awaitable[None]], replica: str
    ) -> None:
        self._store = store
        self._view = view
        self._documents = documents
        self._follow = follow
        self._replica = replica

    # -- catalogue -----------------------------------------------------------------------------------
    async def import_document(self, text: str, actor: Actor, *, force: bool, dry_run: bool) -> Imported:
        """Store a document as a new revision, whole or not at all; this replica follows at once.

        Raises:
            InvalidRequestError: CATALOGUE_INVALID with every problem; nothing changed.
            StoreLostError: the store is away.
        """
        read = await self._read(text)
        if dry_run:
            return Imported(self._view.policy.revision, False, read.warnings)
        added: list[Fact] = []

        def fact(before: int, after: CatalogueRevision) -> Fact:
            added.append(revision_fact(before, after, self._replica, actor.text, "import"))
            return added[-1]

        try:
            stored = await self._store.import_catalogue(
                read.document, read.sha256, force=force, actor=actor.text, fact=fact
            )
            await self._follow()
        except StoreUnavailableError as error:
            raise store_lost() from error
        return Imported(stored.revision, bool(added), read.warnings)

    async def document(self, revision: int | None = None) -> CatalogueRevision:
        """A stored document without the hashes of callers' keys; the one in force unless a revision is named.

        Raises:
            NotFoundError: none was imported, or no such revision.
            StoreLostError: the store is away.
        """
        stored = await self._stored(revision)
        if stored is None:
            named = "no catalogue was ever imported" if revision is None else f"no revision {revision}"
            raise NotFoundError(named)
        return CatalogueRevision(stored.revision, _without_keys(stored.document), stored.sha256, stored.created_at)

    async def lint_rules(self, text: str = "") -> tuple[RuleWarning, ...]:
        """Findings on the rules of a document, or of the catalogue in force.

        Raises:
            InvalidRequestError: CATALOGUE_INVALID: the document cannot be used.
        """
        catalogue = (await self._read(text)).catalogue if text else self._view.policy.catalogue
        found = await asyncio.to_thread(lint, catalogue.providers, catalogue.operator_rules)
        return tuple(
            RuleWarning(f"providers.{each.provider}.rules.{each.rule_id}", each.rule_id, each.code, each.remedy)
            for each in found
        )

    async def _read(self, text: str) -> ReadCatalogue:
        """Beside the event loop: a large document takes seconds, and decisions go on meanwhile."""
        return await asyncio.to_thread(self._documents.read, text)

    async def _stored(self, revision: int | None = None) -> CatalogueRevision | None:
        try:
            return await self._store.catalogue(timeout_ms=STORE_MS, revision=revision)
        except StoreUnavailableError as error:
            raise store_lost() from error

    # -- settings ------------------------------------------------------------------------------------
    def settings(self) -> Settings:
        """Every setting in force, with the source of each."""
        policy = self._view.policy
        return Settings(self._documents.resolve(policy), policy.revision)

    async def patch_settings(
        self, body: object, actor: Actor, if_version: int | None = None, patch: DocumentPatch | None = None
    ) -> Settings:
        """Store the settings that `body` names, all or none; what others patch meanwhile survives.

        Args:
            body: new values by full name, nested or dotted; None takes a stored value back.
            if_version: version that the patch was made for; None: any.
            patch: reads the body where it uses other names (REST).

        Raises:
            InvalidRequestError: every problem of the body.
            VersionMismatchError: `if_version` is not the version in force.
            StoreLostError: the store is away.
        """
        for _ in range(PATCH_TRIES):
            stored = await self._stored()
            version = stored.revision if stored else 0
            if if_version is not None and if_version != version:
                raise _mismatch(if_version, version)
            patched = (patch or self._documents.patch)(stored.document if stored else None, body)
            if await self._store_patch(patched, version, actor):
                return self.settings()
        raise OverloadedError("others keep changing the settings; repeat the patch", retry_after_ms=100)

    async def _store_patch(self, patched: PatchedDocument, version: int, actor: Actor) -> bool:
        """Store a patched document on top of `version`; False where another revision came in between."""
        if patched.changed:
            read = await self._read(patched.document)

            def fact(before: int, after: CatalogueRevision) -> Fact:
                reason = "settings: " + ", ".join(patched.changed)
                return revision_fact(before, after, self._replica, actor.text, reason[:1_024])

            try:
                await self._store.import_catalogue(
                    read.document, read.sha256, force=True, actor=actor.text, if_revision=version, fact=fact
                )
            except RevisionMismatchError:
                return False
            except StoreUnavailableError as error:
                raise store_lost() from error
        await self._followed()
        return True

    async def _followed(self) -> None:
        try:
            await self._follow()
        except StoreUnavailableError as error:
            raise store_lost() from error


def revision_fact(before: int, after: CatalogueRevision, replica: str, actor: str, reason: str) -> Fact:
    """The fact of a new revision; its generation is the revision's number."""
    return Fact(
        id=f"catalogue/{after.revision}",
        at=after.created_at,
        mechanism=MECHANISM,
        key=MECHANISM,
        from_state=str(before),
        to_state=str(after.revision),
        generation=after.revision,
        reason=reason,
        replica=replica,
        actor=actor,
    )


def _mismatch(wanted: int, found: int) -> VersionMismatchError:
    text = f"the settings are at version {found}, the patch was made for {wanted}; read them again"
    return VersionMismatchError(text, metadata={"version": str(found)})


def _without_keys(document: str) -> str:
    data: Mapping[str, Any] = json.loads(document)
    callers: Iterable[Mapping[str, Any]] = data.get("callers") or ()
    shown = [{name: value for name, value in caller.items() if name != _SECRET} for caller in callers]
    return json.dumps({**data, "callers": shown} if shown else data, ensure_ascii=False, separators=(",", ":"))
