"""AdminService on the wire. Its operations are given by name; the others answer UNIMPLEMENTED."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policy_service.generated.policy.v1 import admin_pb2
from policy_service.transport.grpc.auth import Scope
from policy_service.transport.grpc.gate import KEY_NAME, Gate, Unary
from policy_service.transport.grpc.service import service_handler

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
UNKNOWN_ACTOR = "unknown"


class AdminServicer:
    """Methods of AdminService.

    Args:
        operations: implementations by method name: request message to answer message.
    """

    def __init__(self, operations: Mapping[str, Unary] | None = None) -> None:
        self._operations = dict(operations or {})

    def handler(self, gate: Gate) -> Any:
        """Generic handler behind the gate."""
        return service_handler(SERVICE, Scope.ADMIN, gate, self._operations)


def actor_name(actor: admin_pb2.Actor) -> str:
    """Who acts, for the fact: the name given, else that of the bearer key."""
    return actor.name[:256] or KEY_NAME.get() or UNKNOWN_ACTOR
