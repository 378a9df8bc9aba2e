"""What a selection asks of session affinity: session, settings and the connections that may serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from policy_service.application.messages import SelectRequest, SessionSource
from policy_service.application.ports_pins import PinKey
from policy_service.domain.affinity import OnIneligible, PinQuery, PoolMember, resolve_ttl
from policy_service.domain.exclusions import Exclusion
from policy_service.domain.ids import DurationMs, Instant, Target
from policy_service.domain.policy import Policy
from policy_service.domain.session_key import SessionSources, session_hash, session_key

USES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class PinSettings:
    """Settings of session affinity in one catalogue revision."""

    ttl_ms: DurationMs
    on_ineligible: OnIneligible
    require_caller: bool

    @classmethod
    def of(cls, policy: Policy) -> PinSettings:
        """Read from a policy; the legacy name of the TTL is a source of its own there."""
        return cls(
            resolve_ttl(None, cast("int | None", policy.setting("affinity.ttl_ms")), None),
            OnIneligible(str(policy.setting("affinity.on_ineligible"))),
            bool(policy.setting("affinity.require_caller")),
        )


@dataclass(frozen=True, slots=True)
class PinQuestion:
    """One selection's question."""

    query: PinQuery
    pool: Sequence[PoolMember]
    places: Sequence[int] = ()
    """Places of the pool's members among the eligible targets that it was made of."""
    listed: Collection[str] = ()
    """Connections that the request could have, eligible or not."""
    refused: Mapping[str, Exclusion] = field(default_factory=dict)
    """Exclusions by connection."""
    tried: frozenset[str] = frozenset()
    """Connections that failed in this request."""
    model: str = ""
    forced: str = ""
    managed: bool = False

    @property
    def key(self) -> PinKey:
        """Key of the pin that is asked for."""
        return PinKey(self.query.api_key_id, self.query.provider, self.query.session_hash)


class LastUses:
    """Learned statistics of this replica: when a connection was used last, and how often in a row."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: OrderedDict[str, tuple[Instant, int]] = OrderedDict()

    def get(self, connection: str) -> tuple[Instant | None, int]:
        """(last use, consecutive count)."""
        return self._uses.get(connection, (None, 0))

    def note(self, connection: str, consecutive: int, now: Instant) -> None:
        """A connection was handed out."""
        self._uses[connection] = (now, consecutive)
        self._uses.move_to_end(connection)
        while len(self._uses) > USES_KEPT:
            self._uses.popitem(last=False)


def ask(
    request: SelectRequest,
    settings: PinSettings,
    policy: Policy,
    uses: LastUses,
    eligible: Sequence[Target],
    listed: Iterable[Target],
    exclusions: Iterable[Exclusion],
) -> PinQuestion | None:
    """The question of a selection; None where affinity is off.

    Args:
        eligible: targets that all filters left, in the strategy's order; those of the first one's provider and model
            make the pool.
        listed: every target of the request, eligible or not.
        exclusions: why the others are not eligible.
    """
    ttl_ms = resolve_ttl(request.affinity_ttl_ms, settings.ttl_ms, None)
    if not ttl_ms or not eligible:
        return None
    provider, _, model = eligible[0]
    named = {target.connection for target in listed if target.provider == provider}
    places = [i for i, target in enumerate(eligible) if target.provider == provider and target.model == model]
    query = PinQuery(
        request.caller_id,
        provider,
        hash_of(request, provider),
        ttl_ms,
        settings.on_ineligible,
        settings.require_caller,
    )
    return PinQuestion(
        query,
        [_member(eligible[place].connection, policy, uses) for place in places],
        places,
        named,
        {exclusion.target.connection: exclusion for exclusion in exclusions if exclusion.target.provider == provider},
        frozenset(attempt.connection for attempt in request.earlier_attempts),
        model,
        request.forced_connection,
        request.lease is not None,
    )


def hash_of(request: SelectRequest, provider: str) -> str:
    """Hash of the request's session key: the ready one, else derived; empty where it has none."""
    key = request.session_key or session_key(sources(request.session))
    return session_hash(provider, key) if key else ""


def sources(session: SessionSource) -> SessionSources:
    """Fields of the contract as the headers and the body that they were taken from."""
    body: dict[str, object] = {
        "metadata": {"session_id": session.metadata_session_id, "sessionId": session.metadata_session_id_camel},
        "conversation_id": session.conversation_id,
        "session_id": session.session_id,
        "prompt_cache_key": session.prompt_cache_key,
        "input": session.first_user_text,
    }
    return SessionSources(session.headers, body)


def _member(connection: str, policy: Policy, uses: LastUses) -> PoolMember:
    declared = policy.catalogue.connections.get(connection)
    last_used_at, consecutive = uses.get(connection)
    if declared is None:
        return PoolMember(connection, None, last_used_at, consecutive)
    return PoolMember(connection, declared.priority, last_used_at, consecutive, declared.max_sessions)
