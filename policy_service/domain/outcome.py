"""The outcome: what a gateway saw of one attempt, as the mechanisms read it.

Values only. Turning raw bytes and headers into an `Outcome` (error object, code, type, message, errors
inside a 200 stream) is `outcome_parsing`; what it means is `classification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from policy_service.domain.ids import AuthClass, Instant


class Origin(StrEnum):
    """Who made the answer (spec/breaker.md section 4)."""

    UNSET = ""
    UPSTREAM = "upstream"
    TRANSPORT = "transport"
    GATEWAY = "gateway"
    CLIENT = "client"


class CallKind(StrEnum):
    """Why the call was made; only `client` counts for breakers."""

    CLIENT = "client"
    HEALTH_CHECK = "health_check"
    LIVE_TEST = "live_test"


@dataclass(frozen=True, slots=True)
class UsageCounters:
    """Quota counters that the gateway knows for a model (classification.md step 9b); True = spent."""

    day: bool = False
    minute: bool = False
    token: bool = False


class Outcome(NamedTuple):
    """One attempt as reported. `status` is the HTTP status, or the one a network error stands for."""

    status: int | None
    provider: str = ""
    connection: str = ""
    model: str = ""
    auth_class: AuthClass | None = None
    """Class stated with the call; None: the connection's, else the provider's."""
    network_error: str = ""
    code: str = ""
    type: str = ""
    name: str = ""
    message: str = ""
    """Message of the error object, or the whole text where there is no error object."""
    text: str = ""
    """Full searchable text: message and body as it came (non-ASCII unescaped), capped at 64 KiB."""
    body: object | None = None
    """Parsed JSON body; None where it is none."""
    headers: Mapping[str, str] = MappingProxyType({})
    """Lower-case names; of a repeated header the first value."""
    origin: Origin = Origin.UNSET
    failure_kind: str = ""
    call_kind: CallKind = CallKind.CLIENT
    inner_status: int | None = None
    """Status named inside the body or a stream event, where it differs from the outer one."""
    pool_attempt: bool = False
    next_target_same_provider: bool = False
    persist: bool = True
    """False: the pool caller asks not to persist a connection timer (connection_cooldown.md step 20)."""
    usage: UsageCounters | None = None
    egress_address: str = ""
    circuit_open_answer: bool = False
    """The service's own "circuit open" answer came back (breaker.md section 4 test 9)."""
    own_queue_timeout: bool = False
    own_timeout: bool = False
    first_output_ms: int | None = None
    token_expires_at: Instant | None = None
    quota_reset_at: Instant | None = None
    is_error_in_success: bool = False
    """The answer was a 2xx with this error inside."""
    is_model_untold: bool = False
    """An answer alone, without its request: some model was asked for."""

    @property
    def is_success(self) -> bool:
        """2xx without an error inside."""
        return self.status is not None and 200 <= self.status < 300 and not self.network_error

    def header(self, name: str) -> str | None:
        """Value of a header by lower-case name."""
        return self.headers.get(name)
