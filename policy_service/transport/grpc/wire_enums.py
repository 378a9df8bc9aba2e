"""Enums of the contract by the lower-case texts that the rest of the service uses.

One rule for all: the number of a text is the value named PREFIX_TEXT; a text that is not of the list gets number 0,
and the message carries the text beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar, cast

from policy_service.generated.policy.v1 import (
    admin_pb2,
    lease_pb2,
    permit_pb2,
    policy_pb2,
    reasons_pb2,
    stream_pb2,
    types_pb2,
)

N = TypeVar("N", bound=int)


N_co = TypeVar("N_co", bound=int, covariant=True)


class _Wrapper(Protocol[N_co]):
    def items(self) -> Iterable[tuple[str, N_co]]: ...


class WireEnum(Generic[N]):
    """Texts and numbers of one enum, both ways.

    Args:
        wrapper: the generated enum.
        also: further texts, by the text that they stand for.
    """

    def __init__(self, wrapper: _Wrapper[N], also: dict[str, str] | None = None) -> None:
        names = dict(wrapper.items())
        zero = next(name for name, number in names.items() if number == 0)
        prefix = zero.removesuffix("UNSPECIFIED")
        self.texts: dict[int, str] = {
            number: "" if name == zero else name.removeprefix(prefix).lower() for name, number in names.items()
        }
        self._numbers: dict[str, N] = {text: cast(N, number) for number, text in self.texts.items()}
        self._numbers.update({text: self._numbers[same] for text, same in (also or {}).items()})
        self._zero: N = names[zero]

    def number(self, text: str) -> N:
        """Number of a text; 0 for one that is not of the list."""
        return self._numbers.get(text, self._zero)

    def text(self, number: int) -> str:
        """Text of a number; empty for 0 and for numbers of a newer contract."""
        return self.texts.get(number, "")


AUTH_CLASS = WireEnum(types_pb2.AuthClass)
CALL_KIND = WireEnum(types_pb2.CallKind)
PERMIT_KIND = WireEnum(permit_pb2.PermitKind)
PERMIT_STATE = WireEnum(permit_pb2.PermitState)
AFFINITY = WireEnum(policy_pb2.Affinity)
PERMIT_USE = WireEnum(policy_pb2.PermitUse)
MECHANISM = WireEnum(
    reasons_pb2.Mechanism,
    {"connection": "connection_cooldown", "model_lock": "model_lockout", "family_pool": "model_lockout"},
)
EXCLUSION = WireEnum(reasons_pb2.ExclusionReason)
STAGE = WireEnum(reasons_pb2.ExclusionStage)
WAIT = WireEnum(reasons_pb2.WaitReason, {"rate_limited": "rate_limit", "rate_limit_exceeded": "rate_limit"})
TERMINAL = WireEnum(reasons_pb2.TerminalReason)
RECOVERY = WireEnum(reasons_pb2.Recovery, {"switch-combo": "switch_combo", "try-auto": "try_auto"})
OUTCOME = WireEnum(
    reasons_pb2.OutcomeReason,
    {
        "rate_limit_exceeded": "rate_limit",
        "model_capacity": "overloaded",
        "not_found": "model_not_found",
        "success": "none",
    },
)
BLAME = WireEnum(reasons_pb2.BlameScope)
FAILURE = WireEnum(reasons_pb2.FailureKind)
IGNORED = WireEnum(reasons_pb2.IgnoredCause)
NETWORK_ERROR = WireEnum(policy_pb2.NetworkErrorKind)
LOCAL_FAULT = WireEnum(policy_pb2.LocalFaultKind)
ORIGIN = WireEnum(policy_pb2.Origin)
PIN = WireEnum(policy_pb2.PinEffect)
ACTION = WireEnum(policy_pb2.ActionKind)
LEASE_STATE = WireEnum(lease_pb2.LeaseState)
LEASE_END = WireEnum(lease_pb2.LeaseEndReason)
FENCE = WireEnum(lease_pb2.FenceStatus)
BREAKER_STATE = WireEnum(admin_pb2.BreakerState)
BREAKER_CONTROL = WireEnum(admin_pb2.BreakerControl, {"disabled": "disable"})
RESET_SCOPE = WireEnum(admin_pb2.ResetScope)
HEALTH = WireEnum(admin_pb2.HealthStatus)
ABORT = WireEnum(stream_pb2.AbortReason)
