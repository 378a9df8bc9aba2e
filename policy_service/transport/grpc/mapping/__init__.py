"""Contract to use cases and back, one file per direction and call. All findings of a bad request are listed at once."""

from policy_service.transport.grpc.mapping.reading import Reading
from policy_service.transport.grpc.mapping.report_answer import report_answer
from policy_service.transport.grpc.mapping.report_request import report_request
from policy_service.transport.grpc.mapping.select_answer import select_answer
from policy_service.transport.grpc.mapping.select_request import select_request

__all__ = ["Reading", "report_answer", "report_request", "select_answer", "select_request"]
