"""What reports do to session pins: refresh and eviction, written in the background (spec/affinity.md sections 3, 7).

A report is answered from memory; nothing here waits for the store.
"""

from __future__ import annotations

import asyncio
import logging

from policy_service.application.messages import EndKind, PinRef, ReportRequest
from policy_service.application.pin_cache import PinChange
from policy_service.application.pins import Pins
from policy_service.application.ports import StoreUnavailableError
from policy_service.application.ports_pins import PinKey, PinSeen, PinStore
from policy_service.application.report_result import ReportResult
from policy_service.domain.affinity import PinEvent, PinRow, is_evicted, refreshed
from policy_service.domain.ids import DurationMs, Instant, Target

log = logging.getLogger(__name__)

WRITE_MS: DurationMs = 2_000
RETRY_S = 0.5
SWEEP_EVERY_S = 300.0

KEPT, REFRESHED, EVICTED = "kept", "refreshed", "evicted"


class PinReports:
    """The use case, and the task that writes. Not thread-safe: one event loop owns it."""

    def __init__(self, store: PinStore, pins: Pins) -> None:
        self._store = store
        self._pins = pins
        self._wake = asyncio.Event()
        pins.backlog.on_add = self._wake.set
        self._tasks: list[asyncio.Task[None]] = []
        self.swept = 0

    # -- life ----------------------------------------------------------------------------------------
    def start(self) -> None:
        """Write in the background from now on; sweeps at once, then every 5 min."""
        self._tasks = [
            asyncio.create_task(self._write_all(), name="pin-writer"),
            asyncio.create_task(self._sweep(), name="pin-sweep"),
        ]

    async def stop(self) -> None:
        """Write what waits, as far as the store answers, and end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.flush()
        except StoreUnavailableError:
            log.info("%d changes of session pins are lost with this replica", len(self._pins.backlog))

    async def flush(self) -> None:
        """Write everything that waits; StoreUnavailableError where the store is away, then the rest still waits."""
        backlog = self._pins.backlog
        while (found := backlog.first()) is not None:
            await self._write(*found)
            backlog.done(*found)

    # -- reports -------------------------------------------------------------------------------------
    def reported(self, request: ReportRequest, served: Target, result: ReportResult | None, now: Instant) -> str:
        """What the report does to the pin of its decision: `kept`, `refreshed`, `evicted`, or empty without a pin.

        Args:
            served: target that was called, provider canonical.
            result: what the failure meant; None for a success.
        """
        ref = request.token.pin if request.token is not None else None
        if ref is None or request.token is None:
            return ""
        if (served.provider, served.connection) != (ref.provider, ref.connection):
            return KEPT
        key = PinKey(request.token.caller_id, ref.provider, ref.session_hash)
        if result is not None and not result.is_success and self._evicts(request, served, ref, result, now):
            return self._evict(key, ref)
        return self._refresh(key, ref, now) if first_byte_came(request, result) else KEPT

    def first_byte(self, caller_id: str, ref: PinRef, served: Target, now: Instant) -> str:
        """The first stream event of a call came (WatchStream)."""
        if (served.provider, served.connection) != (ref.provider, ref.connection):
            return KEPT
        return self._refresh(PinKey(caller_id, ref.provider, ref.session_hash), ref, now)

    def _evicts(self, request: ReportRequest, served: Target, ref: PinRef, result: ReportResult, now: Instant) -> bool:
        event = pin_event(request, result)
        if event is PinEvent.FAILURE and result.scope == "request" and not result.fallback:
            return False  # the request's own fault says nothing about the connection
        pin = PinRow("", ref.provider, ref.session_hash, ref.connection, 0, 0, 0, ref.version)
        after = self._pins.standing(served, now)
        return is_evicted(event, pin, served.connection, after, self._pins.settings.on_ineligible)

    def _evict(self, key: PinKey, ref: PinRef) -> str:
        self._pins.cache.drop(key)
        self._pins.backlog.add(key, PinChange(PinSeen(ref.connection, ref.version)))
        return EVICTED

    def _refresh(self, key: PinKey, ref: PinRef, now: Instant) -> str:
        """Throttled by what is known here; where nothing is, the statement itself throttles."""
        if self._pins.is_evicting(key):
            return KEPT
        ttl_ms = ref.ttl_ms or self._pins.settings.ttl_ms
        known = self._pins.backlog.local(key, now) or self._pins.cache.get(key, now, trusted_ms=None)
        if known is not None:
            written = refreshed(known, ref.connection, now, ttl_ms)
            if written is None:
                return KEPT
            if self._pins.cache.get(key, now, trusted_ms=None) is not None:
                self._pins.cache.put(key, written, now)
        elif ttl_ms <= 0:
            return KEPT
        self._pins.backlog.add(key, PinChange(PinSeen(ref.connection, ref.version), refresh_ttl_ms=ttl_ms, at=now))
        return REFRESHED

    # -- writing -------------------------------------------------------------------------------------
    async def _write_all(self) -> None:
        while True:
            try:
                await self.flush()
            except StoreUnavailableError:
                await asyncio.sleep(RETRY_S)
                continue
            except Exception:
                log.exception("a change of a session pin cannot be written and is dropped")
                self._drop_first()
                continue
            self._wake.clear()
            await self._wake.wait()

    def _drop_first(self) -> None:
        found = self._pins.backlog.first()
        if found is not None:
            self._pins.backlog.done(*found)

    async def _write(self, key: PinKey, change: PinChange) -> None:
        if change.save is not None:
            await self._save(key, change, change.save)
        elif change.seen is not None and change.refresh_ttl_ms:
            live = await self._store.refresh(key, change.seen, change.at, change.refresh_ttl_ms, timeout_ms=WRITE_MS)
            self._remember(key, live, change.at)
        elif change.seen is not None:
            await self._store.delete(key, change.seen, timeout_ms=WRITE_MS)

    async def _save(self, key: PinKey, change: PinChange, row: PinRow) -> None:
        """A pin held here goes in only if no live one is there, or over the one that it replaced."""
        saved = None
        if change.seen is not None:
            saved = await self._store.move(row, change.seen, timeout_ms=WRITE_MS)
        if saved is None:
            saved = await self._store.insert(row, timeout_ms=WRITE_MS)
        self._remember(key, saved.row if saved is not None else None, row.last_used_at)

    def _remember(self, key: PinKey, row: PinRow | None, at: Instant) -> None:
        if row is None:
            self._pins.cache.drop(key)
        else:
            self._pins.cache.put(key, row, at)

    async def _sweep(self) -> None:
        while True:
            try:
                self.swept += await self._store.sweep(timeout_ms=WRITE_MS)
            except StoreUnavailableError as error:
                log.info("the sweep of session pins waits for the store: %s", error)
            except Exception:
                log.exception("the sweep of session pins failed")
            await asyncio.sleep(SWEEP_EVERY_S)


def first_byte_came(request: ReportRequest, result: ReportResult | None) -> bool:
    """True if the upstream began a good answer; the first byte of an error, or an error as first event, is none."""
    if result is None or result.is_success:
        return True
    if request.status is not None and request.status >= 400:
        return False
    extras = request.extras
    if extras.first_output_ms is not None:
        return True
    return request.first_byte_ms is not None and not extras.stream_error


def pin_event(request: ReportRequest, result: ReportResult) -> PinEvent:
    """A failed attempt in the words of the eviction table."""
    if request.extras.hedge_cancelled:
        return PinEvent.HEDGE_CANCELLED
    if request.extras.target_timeout:
        return PinEvent.ROUTE_TIMEOUT
    if request.end is EndKind.CLIENT_CANCELLED:
        return PinEvent.CLIENT_ABORT
    return PinEvent.LOCAL_REFUSAL if request.end is EndKind.LOCAL_FAULT or result.is_local else PinEvent.FAILURE
