"""A process forked while the client was in use hung in its first call: the channel's threads were not there. It also
took the service for away for ever, since the thread that looks for it was not there either, and sent the parent's kept
reports as well. A child process here ends with 0 when it is served, and with no report of its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from policy_client import Connection, PolicyClient, pool, wire
from tests.fleet.fleet import free_port
from tests.python_client.bare_server import Bare
from tests.python_client.test_clients import Upstream

BOTH = pool("openai/main/gpt", "openai/spare/gpt")
FORKING = """
import os
from policy_client import AwayPolicy, answered, pool
from policy_client.testing import ScriptedPolicy

policy = ScriptedPolicy()
policy.is_away = True
client = policy.client(AwayPolicy(trusts_candidates=True))
client._pending.add()  # a call of the parent that is under way
client.run(pool("openai/main/gpt"), lambda attempt: answered("served", 200))
assert (client.is_away, client.kept_reports) == (True, 1)
child = os.fork()
if child == 0:
    policy.is_away = False
    served = client.run(pool("openai/main/gpt"), lambda attempt: answered("served", 200))
    is_right = not served.attempt.is_local and client.settle(1) and not client.is_away and len(policy.reports) == 1
    os._exit(0 if is_right else 1)
_, status = os.waitpid(child, 0)
os._exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_looks_for_the_service_itself_and_leaves_the_reports_to_its_parent() -> None:
    assert subprocess.run([sys.executable, "-c", FORKING], timeout=30, check=False).returncode == 0


def test_a_forked_process_opens_a_channel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Bare(free_port())
    opened: list[Any] = []
    opens = wire._channel

    def open_one(where: Connection) -> Any:
        opened.append(opens(where))
        return opened[-1]

    monkeypatch.setattr(wire, "_channel", open_one)
    with PolicyClient(where=Connection(server.address, select_ms=5_000)) as client:
        for _ in range(2):
            client.run(BOTH, Upstream(main=200))
        assert len(opened) == 1
        monkeypatch.setattr(os, "getpid", lambda: -1)
        for _ in range(2):
            client.run(BOTH, Upstream(main=200))
        assert len(opened) == 2
        client.settle()
    server.end()
