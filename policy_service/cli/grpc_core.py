"""How the gRPC library does its input and output, which it reads from the environment once, when it is loaded.

docs/adr/0021 says what it gains and what was measured.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.metadata import version

VARIABLE = "GRPC_EXPERIMENTS"
MEASURED = "1.85."
"""Releases of grpcio whose switches these are; the library complains of those that it does not know."""
IN_THE_POLLER = "-event_engine_listener,-event_engine_client,-event_engine_for_all_other_endpoints"
"""Sockets are read and written by the thread that hands completions to the event loop, not by a pool of threads that
hands them to that one: a hop less a message."""


def choose_poller(environment: MutableMapping[str, str], release: str = "") -> None:
    """Set the switches, unless the operator has. To be called before grpc is imported.

    Args:
        environment: of this process; its children inherit it.
        release: of grpcio; empty: the installed one.
    """
    if (release or version("grpcio")).startswith(MEASURED):
        environment.setdefault(VARIABLE, IN_THE_POLLER)
