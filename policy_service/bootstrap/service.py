"""One process of the service, from the database to the listening server.

Clean-up is a last-in-first-out stack whose failures are logged and passed over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from policy_envoy.options import LARGEST_MESSAGE_BYTES

from policy_service.application.admin_catalogue import revision_fact
from policy_service.application.commit import CommitLimits
from policy_service.application.entropy import SystemEntropy
from policy_service.application.follow import FollowSettings
from policy_service.application.ports import CatalogueRevision, SchemaMismatchError
from policy_service.application.replica import OwnershipStores, Replica, ReplicaSettings
from policy_service.bootstrap.envoy_door import ClosedDoor, door_servicer
from policy_service.bootstrap.operations import admin_use_cases, ownership_methods
from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import Policy
from policy_service.settings.catalogue_file import (
    LoadedCatalogue,
    builtin_catalogue,
    load_catalogue,
    load_catalogue_file,
)
from policy_service.settings.problems import ConfigError
from policy_service.settings.reload import CatalogueWatch
from policy_service.settings.server import ServerConfig
from policy_service.storage import event_codec
from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from policy_service.storage.postgres.embedded_host import EmbeddedServerError
from policy_service.storage.postgres.lease_store import PostgresLeaseStore
from policy_service.storage.postgres.permit_store import PostgresPermitStore
from policy_service.storage.postgres.pin_store import PostgresPinStore
from policy_service.storage.postgres.session import StoreOptions
from policy_service.storage.postgres.store import PostgresStore
from policy_service.storage.spool import SqliteSpool
from policy_service.telemetry import setup
from policy_service.telemetry.tracing import TracedReport, TracedSelect, tracer
from policy_service.transport.grpc.admin_operations import admin_operations
from policy_service.transport.grpc.admin_servicer import SERVICE as ADMIN_SERVICE
from policy_service.transport.grpc.admin_servicer import AdminServicer
from policy_service.transport.grpc.auth import KeyRing, bearer_keys
from policy_service.transport.grpc.gate import Gate
from policy_service.transport.grpc.limits import Limits
from policy_service.transport.grpc.listeners import TcpAddress
from policy_service.transport.grpc.mapping import Reading
from policy_service.transport.grpc.policy_servicer import PolicyServicer
from policy_service.transport.grpc.server import PolicyServer, ServerOptions
from policy_service.transport.grpc.stream_methods import StreamMethods
from policy_service.transport.grpc.tls import TlsFiles
from policy_service.transport.grpc.token import TokenSeal

log = logging.getLogger(__name__)

RELEASE = version("policy-service")
REVIVE_EVERY_S = 1.0
FILE_ACTOR = "catalogue file"
"""Actor of imports that a changed file causes."""


def monotonic_ms() -> float:
    """The host's monotonic clock, ms."""
    return time.monotonic() * 1000


@dataclass(frozen=True, slots=True)
class Worker:
    """Which of the processes that share the port this is."""

    index: int = 0
    count: int = 1

    @property
    def shares_port(self) -> bool:
        """More than one process binds the same port."""
        return self.count > 1


class Service:
    """Everything of one process, from the database to the listening server.

    Args:
        config: the process configuration.
        environment: variables of policy settings.
        worker: which of several processes this is.
    """

    def __init__(
        self, config: ServerConfig, environment: Mapping[str, str] | None = None, worker: Worker | None = None
    ) -> None:
        self.config = config
        self.environment = environment or {}
        self.worker = worker or Worker()
        self.name = replica_name(config, self.worker)
        self.database = ""
        """Which database is in use, without its password."""
        self.taken_over = 0
        """Reports of earlier lives that the spool held."""
        self._stack = AsyncExitStack()
        self.store: PostgresStore
        self.replica: Replica
        self.server: PolicyServer
        self._spool: SqliteSpool
        self._watch: CatalogueWatch | None = None
        self._door: Any = None
        """The ext_proc service; only where it is served."""

    async def start(self) -> None:
        """Start everything; on an error whatever was started is stopped again."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        self.store = await self._open_store()
        name = self.name.replace("/", "_")
        self._spool = SqliteSpool(self.config.spool_path, name, self.config.spool.max_bytes)
        if self._spool.directory.name != name:
            log.warning(
                "another process on this data directory is called %r too: give each a name of its own (--replica), or "
                "a data directory of its own (--data-dir)",
                self.name,
            )
        self._stack.push_async_callback(self._spool.close)
        policy = await self._first_policy()
        self.replica = self._build_replica(policy)
        self.server = await self._build_server()
        await self.server.start()
        self._stack.push_async_callback(self._shut_down)
        self.taken_over = await self.replica.start()
        self._start_watch()
        self.server.health.set_ready(True)

    async def stop(self) -> None:
        """Drain and stop, last started first; a failing step does not keep the others."""
        try:
            await self._stack.aclose()
        except Exception:
            log.exception("a part did not stop cleanly")

    async def _shut_down(self) -> None:
        """Drain first: calls in flight still need the replica."""
        await self.server.drain()
        if self._door is not None:
            await self._door.close()
        await self.replica.stop()

    # -- store ---------------------------------------------------------------------------------------
    async def _open_store(self) -> PostgresStore:
        url = self.config.database_text
        if url is None:
            embedded = await EmbeddedServer.start(self.config.data_path)
            self._stack.push_async_callback(asyncio.to_thread, embedded.close)
            keeper = asyncio.create_task(_keep_running(embedded), name="embedded-server")
            self._stack.push_async_callback(_cancelled, keeper)
            url = embedded.url
            self.database = f"embedded Postgres in {self.config.data_path}"
            await schema.upgrade(url)
        else:
            self.database = _without_password(url)
            await _ensure_schema(url, self.config.store.connect_ms)
        store = await PostgresStore.connect(url, self._store_options())
        self._stack.push_async_callback(store.close)
        return store

    def _store_options(self) -> StoreOptions:
        store = self.config.store
        return StoreOptions(
            application_name=f"policy-service {self.name}"[:63],
            pool_size=store.pool_size,
            connect_timeout_ms=store.connect_ms,
            has_transaction_pooler=store.pgbouncer,
            notifications=store.notifications,
        )

    # -- catalogue -----------------------------------------------------------------------------------
    async def _first_policy(self) -> Policy:
        """The catalogue in force: the file where it is new, else what is stored, else the built-in providers."""
        if self.config.catalogue:
            loaded = load_catalogue_file(self.config.catalogue, environment=self.environment)
            await self._import(loaded, force=False)
        stored = await self.store.catalogue(timeout_ms=self.config.store.operation_ms)
        return (
            self.compile(stored)
            if stored
            else Policy(builtin_catalogue(), self.environment, unlisted=AuthClass.API_KEY)
        )

    def compile(self, stored: CatalogueRevision) -> Policy:
        """Policy of a stored revision; ConfigError where this release cannot use it."""
        loaded = load_catalogue(stored.document, source=f"revision {stored.revision}", environment=self.environment)
        return Policy(loaded.catalogue, self.environment, stored.revision, unlisted=AuthClass.API_KEY)

    def _recompile(self, stored: CatalogueRevision) -> Policy:
        try:
            return self.compile(stored)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    async def _import(self, loaded: LoadedCatalogue, *, force: bool) -> None:
        for warning in loaded.warnings:
            log.warning("catalogue: %s", warning)
        await self.store.import_catalogue(
            loaded.document_json,
            loaded.sha256,
            force=force,
            actor=FILE_ACTOR,
            fact=lambda before, after: revision_fact(before, after, self.name, FILE_ACTOR, "import"),
        )

    def _start_watch(self) -> None:
        if not self.config.catalogue:
            return
        path = Path(self.config.catalogue).expanduser()
        self._watch = CatalogueWatch(
            path,
            self._apply_file,
            lambda error: log.error(
                "the catalogue file is not usable, revision %d stays: %s", self.replica.view.policy.revision, error
            ),
            environment=self.environment,
            poll_ms=self.config.catalogue_poll_ms,
        )
        with suppress(OSError):
            self._watch.remember(path.read_text(encoding="utf-8"))
        task = asyncio.create_task(self._watch.run(), name="catalogue-watch")
        self._stack.push_async_callback(_cancelled, task)

    async def _apply_file(self, loaded: LoadedCatalogue, force: bool) -> bool:
        try:
            await self._import(loaded, force=force)
            await self.replica.refresh()
        except Exception:
            log.exception("the changed catalogue could not be imported and is tried again")
            return False
        return True

    def reload(self) -> None:
        """Import the catalogue file again, changed or not (SIGHUP)."""
        if self._watch is not None:
            self._watch.force()

    # -- replica and server ----------------------------------------------------------------------------
    def _build_replica(self, policy: Policy) -> Replica:
        store = self.config.store
        settings = ReplicaSettings(
            self.name,
            select_ms=store.select_ms,
            stale_after_ms=store.max_view_age_ms,
            commit=CommitLimits(
                report_ms=store.report_ms,
                commit_ms=store.operation_ms,
                interval_ms=store.commit_interval_ms,
                away_after=store.away_after_timeouts,
                retry_ms=store.retry_ms,
            ),
            follow=FollowSettings(poll_ms=store.poll_ms, notifications=store.listens),
            list_exclusions_always=self._is_traced,
            operation_ms=store.operation_ms,
            awaits_failover=store.failover == "async",
            release=RELEASE,
        )
        stores = OwnershipStores(
            PostgresLeaseStore(self.store),
            PostgresPermitStore(self.store, self.name, awaits_failover=store.failover == "async"),
            PostgresPinStore(self.store),
        )
        return Replica(
            self.store,
            self._spool,
            policy,
            SystemEntropy(),
            settings,
            stores=stores,
            compile_revision=self._recompile,
            monotonic_ms=monotonic_ms,
            encode_event=event_codec.encode,
            decode_event=event_codec.decode,
        )

    @property
    def _is_traced(self) -> bool:
        return self.config.telemetry.traces and setup.wants_traces(os.environ)

    async def _build_server(self) -> PolicyServer:
        config = self.config
        limits = Limits(
            config.limits.max_message_bytes,
            config.limits.max_concurrent_rpcs,
            config.limits.max_candidates,
            config.limits.max_batch,
            config.limits.max_headers,
            config.limits.body_bytes,
        )
        auth = config.auth
        keys = KeyRing(
            bearer_keys(auth.key_hashes, auth.admin_key_hashes), admin_is_open=not config.listen.open_addresses
        )
        gate = Gate(keys, limits, _deadlines(config), is_traced=self._is_traced)
        seal = TokenSeal(await self.store.secrets(), config.token_max_age_s * 1000)
        reading = Reading(seal, self.replica.clock, SystemEntropy(), limits)
        selects, reports = self._use_cases()
        cases = admin_use_cases(self.replica, self.environment, lambda: self._spool.entries, RELEASE)
        further, more_admin = ownership_methods(self.replica, reading)
        admin = AdminServicer({**admin_operations(cases, reading), **more_admin})
        streams = StreamMethods(self.replica.watch, reading).streams()
        policy = PolicyServicer(selects, reports, reading, further, streams)
        return PolicyServer(self._options(), gate, (policy, admin, *self._envoy_door(policy, further)))

    def _envoy_door(self, policy: PolicyServicer, further: Mapping[str, Any]) -> tuple[Any, ...]:
        """The ext_proc service; where it is not wanted, a word for the Envoy that asks for it."""
        if not self.config.envoy.enabled:
            return (ClosedDoor(),)
        self._door = door_servicer(policy, further, self.config.envoy, lambda: self.replica.view.policy)
        return (self._door,)

    def _use_cases(self) -> tuple[Any, Any]:
        replica = self.replica
        if not self._is_traced:
            return replica.select, replica.report
        provider = setup.trace_provider(self.name, RELEASE)
        self._stack.push_async_callback(asyncio.to_thread, provider.shutdown)
        ours, events = tracer(provider), self.config.telemetry.max_span_events
        return TracedSelect(replica.select, ours, events), TracedReport(replica.report, ours, events)

    def _options(self) -> ServerOptions:
        config = self.config
        tls = config.tls
        files = TlsFiles(
            Path(tls.cert_file), Path(tls.key_file), Path(tls.client_ca_file) if tls.client_ca_file else None
        )
        return ServerOptions(
            tcp=tuple(map(TcpAddress.parse, config.listen.tcp)),
            unix=Path(config.listen.unix) if config.listen.unix and self.worker.index == 0 else None,
            tls=files if tls.enabled else None,
            shares_port=self.worker.shares_port,
            notice_ms=min(1_000, config.drain_ms // 4),
            drain_ms=config.drain_ms,
            largest_message_bytes=LARGEST_MESSAGE_BYTES if config.envoy.enabled else 0,
        )


def replica_name(config: ServerConfig, worker: Worker) -> str:
    """Name of this replica in facts and health."""
    base = config.replica or socket.gethostname()
    return f"{base}/{worker.index}" if worker.shares_port else base


async def _ensure_schema(url: str, timeout_ms: int) -> None:
    """An empty database gets the schema; an older or newer one is left alone and named."""
    try:
        await schema.check(url, timeout_ms=timeout_ms)
    except SchemaMismatchError as error:
        if error.found is not None:
            raise
        await schema.upgrade(url)


def _without_password(url: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).render_as_string(hide_password=True)


def _deadlines(config: ServerConfig) -> dict[str, int]:
    """Longest time of a call by method name, ms. Selections may stand in line within the permit's limit."""
    limits = config.deadlines
    leases = ("AcquireLease", "RenewLease", "ReleaseLease", "GetLease", "CheckFence")
    permits = ("AcquirePermit", "RenewPermit", "ReleasePermit", "CancelPermit")
    return {
        **dict.fromkeys(("SelectTarget", "SelectTargets"), limits.permit_ms),
        **dict.fromkeys(("ReportOutcome", "ReportOutcomes"), limits.report_ms),
        **dict.fromkeys(leases, limits.lease_ms),
        **dict.fromkeys(permits, limits.permit_ms),
        **dict.fromkeys((method.name for method in ADMIN_SERVICE.methods), limits.admin_ms),
    }


async def _keep_running(embedded: EmbeddedServer) -> None:
    """Start the embedded server again whenever it is lost; nobody else watches it."""
    complaint = ""
    while True:
        await asyncio.sleep(REVIVE_EVERY_S)
        try:
            if await asyncio.to_thread(embedded.revive):
                log.warning("the embedded Postgres was gone and was started again")
            complaint = ""
        except (EmbeddedServerError, OSError) as error:
            if str(error) != complaint:
                complaint = str(error)
                log.error("the embedded Postgres is gone and cannot be started: %s", complaint)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
