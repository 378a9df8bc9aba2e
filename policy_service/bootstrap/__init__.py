"""Puts the parts together: the one place that knows every part. Building and running, no rules."""

from policy_service.bootstrap.running import Announce, run, serve
from policy_service.bootstrap.service import RELEASE, Service, Worker

__all__ = ["RELEASE", "Announce", "Service", "Worker", "run", "serve"]
