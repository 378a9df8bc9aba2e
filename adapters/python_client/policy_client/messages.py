"""Messages of the contract `policy.v1`, typed, under one import; what each field means is said in the proto files.

    from policy_client import messages
    messages.SelectTargetRequest(route="chat", caller_id="team-a")

`pool` and `route` write the most common requests.
"""

from __future__ import annotations

from policy_client._generated.policy.v1.lease_pb2 import (
    FENCE_STATUS_VALID,
    LEASE_END_REASON_CLIENT_CANCELLED,
    LEASE_END_REASON_OWNER_EXIT,
    AcquireLeaseRequest,
    AcquireLeaseResponse,
    CheckFenceRequest,
    CheckFenceResponse,
    FenceStatus,
    GetLeaseRequest,
    GetLeaseResponse,
    Lease,
    LeaseContext,
    LeaseUnavailable,
    ReleaseLeaseRequest,
    ReleaseLeaseResponse,
    RenewLeaseRequest,
    RenewLeaseResponse,
)
from policy_client._generated.policy.v1.permit_pb2 import (
    AcquirePermitRequest,
    AcquirePermitResponse,
    CancelPermitRequest,
    CancelPermitResponse,
    Gate,
    Permit,
    ReleasePermitRequest,
    ReleasePermitResponse,
    RenewPermitRequest,
    RenewPermitResponse,
)
from policy_client._generated.policy.v1.policy_pb2 import (
    ACTION_KIND_FALL_BACK,
    ACTION_KIND_RETRY_SAME,
    ACTION_KIND_RETURN_TO_CLIENT,
    ACTION_KIND_WAIT_AND_SELECT,
    ORIGIN_CLIENT,
    ORIGIN_GATEWAY,
    ORIGIN_TRANSPORT,
    ORIGIN_UPSTREAM,
    Action,
    ClientCancel,
    Dispatch,
    Exclusion,
    LocalFault,
    LocalFaultKind,
    NetworkErrorKind,
    Reject,
    ReportDetails,
    ReportOutcomeRequest,
    ReportOutcomeResponse,
    ReportOutcomesRequest,
    ReportOutcomesResponse,
    SelectTargetRequest,
    SelectTargetResponse,
    SelectTargetsRequest,
    SelectTargetsResponse,
    Verdict,
    Wait,
)
from policy_client._generated.policy.v1.types_pb2 import (
    AuthClass,
    CallKind,
    Candidate,
    Degradation,
    EarlierAttempt,
    Header,
    RequestTraits,
    SessionSource,
    Target,
)

__all__ = [
    "ACTION_KIND_FALL_BACK",
    "ACTION_KIND_RETRY_SAME",
    "ACTION_KIND_RETURN_TO_CLIENT",
    "ACTION_KIND_WAIT_AND_SELECT",
    "FENCE_STATUS_VALID",
    "LEASE_END_REASON_CLIENT_CANCELLED",
    "LEASE_END_REASON_OWNER_EXIT",
    "ORIGIN_CLIENT",
    "ORIGIN_GATEWAY",
    "ORIGIN_TRANSPORT",
    "ORIGIN_UPSTREAM",
    "AcquireLeaseRequest",
    "AcquireLeaseResponse",
    "AcquirePermitRequest",
    "AcquirePermitResponse",
    "Action",
    "AuthClass",
    "CallKind",
    "CancelPermitRequest",
    "CancelPermitResponse",
    "Candidate",
    "CheckFenceRequest",
    "CheckFenceResponse",
    "ClientCancel",
    "Degradation",
    "Dispatch",
    "EarlierAttempt",
    "Exclusion",
    "FenceStatus",
    "Gate",
    "GetLeaseRequest",
    "GetLeaseResponse",
    "Header",
    "Lease",
    "LeaseContext",
    "LeaseUnavailable",
    "LocalFault",
    "LocalFaultKind",
    "NetworkErrorKind",
    "Permit",
    "Reject",
    "ReleaseLeaseRequest",
    "ReleaseLeaseResponse",
    "ReleasePermitRequest",
    "ReleasePermitResponse",
    "RenewLeaseRequest",
    "RenewLeaseResponse",
    "RenewPermitRequest",
    "RenewPermitResponse",
    "ReportDetails",
    "ReportOutcomeRequest",
    "ReportOutcomeResponse",
    "ReportOutcomesRequest",
    "ReportOutcomesResponse",
    "RequestTraits",
    "SelectTargetRequest",
    "SelectTargetResponse",
    "SelectTargetsRequest",
    "SelectTargetsResponse",
    "SessionSource",
    "Target",
    "Verdict",
    "Wait",
    "pool",
    "route",
]


def route(name: str, *, caller_id: str = "", session_key: str = "") -> SelectTargetRequest:
    """A request for a route of the catalogue."""
    return SelectTargetRequest(route=name, caller_id=caller_id, session_key=session_key)


def pool(*targets: str, caller_id: str = "", session_key: str = "") -> SelectTargetRequest:
    """A request over inline candidates, in order of preference.

    Args:
        targets: each `provider/connection/model`; what stands behind the provider may be left out.
        caller_id: who asks; needed for session affinity and leases.
        session_key: keeps a conversation on its account.
    """
    return SelectTargetRequest(candidates=map(_candidate, targets), caller_id=caller_id, session_key=session_key)


def _candidate(text: str) -> Candidate:
    provider, connection, model = [*text.split("/", 2), "", ""][:3]
    return Candidate(provider=provider, connection=connection, model=model)
