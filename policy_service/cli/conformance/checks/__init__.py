"""The checks: pure functions of a record and the arguments of a case. Importing this package enters all of them."""

from policy_service.cli.conformance.checks import client, dispatching, leases, permits, reporting, selecting
from policy_service.cli.conformance.checks.findings import CHECKS, Finding, Status

__all__ = ["CHECKS", "Finding", "Status", "client", "dispatching", "leases", "permits", "reporting", "selecting"]
