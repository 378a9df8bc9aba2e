"""Client of the policy service: asks where a call may go, makes it, reports what came back, and goes on.

    async with AsyncPolicyClient("127.0.0.1:50051") as policy:
        result = await policy.run(pool("openai/main/gpt-4o", "openai/spare/gpt-4o"), call)

`PolicyClient` is the same for code that blocks, `policy_client.httpx` the transport for SDKs, `policy_client.testing`
the fake for tests, `policy_client.outcomes` what an attempt may end with.
"""

from policy_client import messages, outcomes
from policy_client.asynchronous import AsyncLease, AsyncPolicyClient
from policy_client.away import AwayPolicy, FailMode
from policy_client.connection import Connection, Tls
from policy_client.errors import (
    ClientClosedError,
    FenceError,
    FieldViolation,
    ForbiddenError,
    InvalidCallError,
    LeaseLostError,
    LeaseUnavailableError,
    NoTargetError,
    OverloadedError,
    PolicyClientError,
    RefusedWhileAwayError,
    ServiceAwayError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)
from policy_client.leasing import Wanted, new_owner
from policy_client.messages import pool, route
from policy_client.outcomes import Outcome
from policy_client.steps import Answer, Attempt, Budget, Result, answered, streaming
from policy_client.synchronous import Lease, PolicyClient

__all__ = [
    "Answer",
    "AsyncLease",
    "AsyncPolicyClient",
    "Attempt",
    "AwayPolicy",
    "Budget",
    "ClientClosedError",
    "Connection",
    "FailMode",
    "FenceError",
    "FieldViolation",
    "ForbiddenError",
    "InvalidCallError",
    "Lease",
    "LeaseLostError",
    "LeaseUnavailableError",
    "NoTargetError",
    "Outcome",
    "OverloadedError",
    "PolicyClient",
    "PolicyClientError",
    "RefusedWhileAwayError",
    "Result",
    "ServiceAwayError",
    "ServiceError",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "Wanted",
    "answered",
    "messages",
    "new_owner",
    "outcomes",
    "pool",
    "route",
    "streaming",
]
