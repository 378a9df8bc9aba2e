"""`ask.py` tells a script by its exit code whether there is a target."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.integration.serving import config, serving
from tests.polyglot.doors import EXAMPLES
from tests.polyglot.world import behaving, catalogue, written

NO_TARGET = 3


async def code_of(address: str, *line: str) -> int:
    """Exit code of one command."""
    command = [sys.executable, str(EXAMPLES / "ask.py"), *line]
    child = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "POLICY_LISTEN_TCP": address}, stdout=asyncio.subprocess.DEVNULL
    )
    return await child.wait()


async def test_a_reader_that_has_enough_is_no_fault(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url)) as (service, _):
        line = f"{sys.executable} {EXAMPLES / 'ask.py'} select openai/main/m --times 50 | true"
        child = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", line),
            env={**os.environ, "POLICY_LISTEN_TCP": service.server.addresses[-1]},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await child.communicate()
    assert (child.returncode, said) == (0, b"")


async def test_a_reject_and_a_wait_are_no_success(tmp_path: Path, embedded_url: str) -> None:
    async with behaving("main") as upstreams:
        file = written(tmp_path, catalogue(upstreams, {"chat": ["main"]}))
        async with serving(config(tmp_path, embedded_url, catalogue=str(file))) as (service, _):
            address = service.server.addresses[-1]
            assert await code_of(address, "select", "--route", "chat") == 0
            assert await code_of(address, "select", "--route", "nowhere") == NO_TARGET
            assert await code_of(address, "call", "--route", "nowhere", "--answers", "200") == NO_TARGET
            assert await code_of(address, "report", "house/main/m", "429", "--header", "retry-after=60") == 0
            assert await code_of(address, "select", "--route", "chat") == NO_TARGET
            assert await code_of(address, "select", "--route", "chat", "--no-wait") == NO_TARGET
