"""The one mapper from the error root to gRPC: status code, google.rpc details, trailers (DESIGN section 5).

Every error leaves with ErrorInfo (domain `policy.v1`, reason of the contract's ErrorReason); wrong fields as
BadRequest; RetryInfo and the `grpc-retry-pushback-ms` trailer where waiting helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from policy_service.application.errors import ErrorKind, FieldProblem, InvalidRequestError, PolicyError

DOMAIN = "policy.v1"
CODES = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorKind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.CONFLICT: grpc.StatusCode.ABORTED,
    ErrorKind.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorKind.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}
# Details travel in a trailer; clients refuse metadata above 8 KiB, base64 and the message included.
_MAX_VIOLATIONS = 12
_MAX_TEXT = 120
_MAX_MESSAGE = 600

Trailers = tuple[tuple[str, str | bytes], ...]


def to_status(error: PolicyError) -> status_pb2.Status:
    """The error as google.rpc.Status with its details (also the form of a failed batch item)."""
    status = status_pb2.Status(code=CODES[error.kind].value[0], message=_cut(error.message, _MAX_MESSAGE))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def trailers(error: PolicyError, status: status_pb2.Status) -> Trailers:
    """Trailing metadata: the details, and the pushback that standard retry policies obey."""
    details: Trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    if error.retry_after_ms is None:
        return details
    return (*details, ("grpc-retry-pushback-ms", str(error.retry_after_ms)))


async def abort(context: Any, error: PolicyError) -> NoReturn:
    """End the call with the error; never returns."""
    status = to_status(error)
    await context.abort(CODES[error.kind], status.message, trailers(error, status))
    raise AssertionError("abort returned")


def _details(error: PolicyError) -> list[Message]:
    found: list[Message] = [_error_info(error)]
    if isinstance(error, InvalidRequestError):
        found.append(_bad_request(error.problems))
    if error.retry_after_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return found


def _error_info(error: PolicyError) -> error_details_pb2.ErrorInfo:
    metadata = {name: _cut(value, 2 * _MAX_TEXT) for name, value in error.metadata.items()}
    if isinstance(error, InvalidRequestError) and len(error.problems) > _MAX_VIOLATIONS:
        metadata["problems"] = str(len(error.problems))
    return error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)


def _bad_request(problems: Sequence[FieldProblem]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(problem.path, _MAX_TEXT), description=_described(problem), reason=problem.reason
            )
            for problem in problems[:_MAX_VIOLATIONS]
        ]
    )


def _described(problem: FieldProblem) -> str:
    text = f"{problem.problem}; {problem.remedy}" if problem.remedy else problem.problem
    return _cut(text, 2 * _MAX_TEXT)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
