"""What operators change in the state: breakers, cooldowns, terminal states, model locks, connections
(spec/breaker.md section 10, operator_surface.md section 4, terminal_states.md, model_lockout.md section 6).
"""

from __future__ import annotations

from collections.abc import Sequence

from policy_service.application.admin import Actor, Acts, store_lost
from policy_service.application.admin_listings import BreakerView, breaker_view
from policy_service.application.admin_owned import OwnedState, note_resets
from policy_service.application.admin_plan import (
    CONTROLS,
    RESETTERS,
    SCOPES,
    Selection,
    clear_all_locks,
    clear_model_lock,
    control_breaker,
    reset_scopes,
    reset_unit_scope,
)
from policy_service.application.connection_acts import change_credential, recover_connection, set_enabled
from policy_service.application.errors import FieldProblem, InvalidRequestError
from policy_service.application.ports import Committed, Scope, StoreUnavailableError
from policy_service.application.view import View
from policy_service.domain.breaker import BreakerState, split_name
from policy_service.domain.connection_state import ConnectionState
from policy_service.domain.cooldown import RecoveryView
from policy_service.domain.facts import FactLog
from policy_service.domain.ids import Instant
from policy_service.domain.state import StateBook

DEFAULT_SCOPES = ("breakers",)


class StateAdmin:
    """Acts on the state. Provider names are resolved to canonical ids here."""

    def __init__(self, acts: Acts, view: View, owned: OwnedState) -> None:
        self._acts = acts
        self._view = view
        self._owned = owned

    # -- breakers ------------------------------------------------------------------------------------
    async def control_breaker(self, key: str, control: str, actor: Actor) -> BreakerView:
        """Set, clear or reset the manual control of one key; setting what is set changes nothing.

        Args:
            key: provider, or `<provider>::conn::<connection>`.
            control: `force_open`, `disable`, `reset` or `clear_override`.

        Raises:
            InvalidRequestError: no key, or no such control.
            StoreLostError: the store is away.
        """
        provider, connection = self._breaker_key(key)
        if control not in CONTROLS:
            raise invalid("control", f"unknown control {control!r}", "one of " + ", ".join(CONTROLS))

        def act(book: StateBook, now: Instant, facts: FactLog) -> BreakerState:
            return control_breaker(book, control, provider, connection, now, facts)

        committed = await self._acts.act(_one(provider, connection), actor, act)
        return self._shown(committed.value, committed.at)

    async def reset_breakers(self, actor: Actor) -> tuple[BreakerView, ...]:
        """Reset every breaker that is not in its default state; those that were reset.

        Raises:
            StoreLostError: the store is away.
        """
        committed = await self._reset(DEFAULT_SCOPES, Selection(), actor)
        rows = (row for _, row in committed.rows if isinstance(row, BreakerState))
        return tuple(self._shown(row, committed.at) for row in sorted(rows, key=lambda row: row.name))

    def _breaker_key(self, key: str) -> tuple[str, str]:
        provider, connection = split_name(key)
        if not provider.strip():
            raise required("key", "a provider, or <provider>::conn::<connection>")
        return self._view.policy.canonical(provider), connection

    def _shown(self, row: BreakerState, now: Instant) -> BreakerView:
        return breaker_view(row, self._view.policy, now)

    # -- reset ---------------------------------------------------------------------------------------
    async def reset(self, scopes: Sequence[str], provider: str, connection: str, actor: Actor) -> int:
        """Clear the state of the named scopes; the number of rows changed.

        Args:
            scopes: names of operator_surface.md section 4.
            provider, connection: narrow the reset; empty narrows nothing.

        Raises:
            InvalidRequestError: no scope, unknown scopes, or a connection without its provider.
            StoreLostError: the store is away.
        """
        _check_scopes(scopes)
        if connection and not provider:
            raise required("provider", "the provider of the connection")
        selection = Selection(self._view.policy.canonical(provider) if provider else "", connection)
        return (await self._reset(tuple(dict.fromkeys(scopes)), selection, actor)).value

    async def recover(self, provider: str, connection: str, seen: RecoveryView, actor: Actor) -> bool:
        """Clear timer, level and error of a connection that a recovery job found healthy; False: it is no longer as the
        job saw it, or in a terminal state, and nothing was done (spec/connection_cooldown.md section 6).

        Raises:
            InvalidRequestError: provider or connection is missing.
            StoreLostError: the store is away.
        """
        owner = self._owner(provider, connection)

        def act(book: StateBook, now: Instant, facts: FactLog) -> bool:
            return recover_connection(book, owner, connection, seen, now, facts)

        return (await self._acts.act(_one(owner, connection), actor, act, "recovered")).value

    async def _reset(self, scopes: Sequence[str], selection: Selection, actor: Actor) -> Committed[int]:
        try:
            counts = await self._owned.reset(scopes, selection)
        except StoreUnavailableError as error:
            raise store_lost() from error
        of_rows = [scope for scope in scopes if scope in RESETTERS]

        def act(book: StateBook, now: Instant, facts: FactLog) -> int:
            return reset_scopes(book, of_rows, selection, now, facts) + note_resets(counts, selection, facts)

        return await self._acts.act(reset_unit_scope(selection), actor, act)

    # -- model locks ---------------------------------------------------------------------------------
    async def clear_model_lock(self, provider: str, connection: str, model: str, actor: Actor) -> int:
        """Remove the locks of one model, on every connection where none is named; the locks removed.

        Raises:
            InvalidRequestError: provider or model is missing.
            StoreLostError: the store is away.
        """
        missing = [name for name, value in (("provider", provider), ("model", model)) if not value]
        if missing:
            raise InvalidRequestError(tuple(_missing(name, "name it, or clear all locks") for name in missing))
        policy = self._view.policy
        owner = policy.canonical(provider)

        def act(book: StateBook, _now: Instant, facts: FactLog) -> int:
            return clear_model_lock(book, owner, connection, model, policy, facts)

        return (await self._acts.act(_one(owner, connection), actor, act, "cleared")).value

    async def clear_all_model_locks(self, actor: Actor) -> int:
        """Remove every model lock of the fleet; the locks removed.

        Raises:
            StoreLostError: the store is away.
        """
        return (await self._acts.act(reset_unit_scope(Selection()), actor, clear_all_locks)).value

    # -- connections ---------------------------------------------------------------------------------
    async def change_credential(
        self, provider: str, connection: str, token_expires_at: Instant | None, actor: Actor
    ) -> Committed[ConnectionState]:
        """The credential was replaced or renewed: terminal state, timer and streaks end, the generation rises.

        Raises:
            InvalidRequestError: provider or connection is missing.
            StoreLostError: the store is away.
        """
        owner = self._owner(provider, connection)

        def act(book: StateBook, now: Instant, facts: FactLog) -> ConnectionState:
            return change_credential(book, owner, connection, now, facts, token_expires_at)

        return await self._acts.act(_one(owner, connection), actor, act, "credential_changed")

    async def set_enabled(
        self, provider: str, connection: str, enabled: bool, actor: Actor
    ) -> tuple[ConnectionState, bool]:
        """Switch a connection on or off; the row after it, and whether that changed anything.

        Raises:
            InvalidRequestError: provider or connection is missing, or the catalogue switches the connection off.
            StoreLostError: the store is away.
        """
        owner = self._owner(provider, connection)
        if enabled and connection in self._view.policy.disabled_connections:
            raise invalid("connection", "switched off by the catalogue", "set enabled: true in the catalogue")

        def act(book: StateBook, now: Instant, facts: FactLog) -> tuple[ConnectionState, bool]:
            return set_enabled(book, owner, connection, enabled, now, facts)

        return (await self._acts.act(_one(owner, connection), actor, act, "enabled" if enabled else "disabled")).value

    def _owner(self, provider: str, connection: str) -> str:
        missing = [name for name, value in (("provider", provider), ("connection", connection)) if not value]
        if missing:
            raise InvalidRequestError(tuple(_missing(name, "name it") for name in missing))
        return self._view.policy.canonical(provider)


def _check_scopes(scopes: Sequence[str]) -> None:
    listed = "one or more of " + ", ".join(SCOPES)
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        problem = f"unknown scope {unknown[0]!r}" if unknown else "empty"
        raise invalid("scopes", problem, listed)


def _one(provider: str, connection: str) -> Scope:
    """One connection, or everything of the provider."""
    own = frozenset({provider})
    return Scope(own, frozenset({(provider, connection)})) if connection else Scope(own, whole_providers=own)


def invalid(path: str, problem: str, remedy: str) -> InvalidRequestError:
    """One wrong field."""
    return InvalidRequestError((FieldProblem(path, problem, remedy),))


def required(path: str, remedy: str) -> InvalidRequestError:
    """One missing field."""
    return InvalidRequestError((_missing(path, remedy),))


def _missing(path: str, remedy: str) -> FieldProblem:
    return FieldProblem(path, "missing", remedy, "FIELD_REQUIRED")
