"""`demo`: the service at work on real traffic, beside a gateway that goes without it.

Upstreams on loopback misbehave on a script; a small gateway asks the service where to go and reports what came back;
a naive gateway gets the same requests at the same instants against upstreams of its own with the same script.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Final

import uvloop
from rich.console import Console

from policy_service.cli import exit_codes
from policy_service.cli.demo.display import LiveScreen
from policy_service.cli.demo.plain import PlainScreen
from policy_service.cli.demo.scene import Screen
from policy_service.cli.demo.script import FAST, NORMAL
from policy_service.cli.demo.service_process import ServiceNotStartedError
from policy_service.cli.demo.stage import perform
from policy_service.cli.demo.summary import render
from policy_service.cli.interruption import interruptible
from policy_service.cli.output import note, say

JSON_VARIABLE: Final = "POLICY_DEMO_JSON"
"""Set to 1: the last line of standard output is the summary as JSON."""


def run(fast: bool) -> int:
    """Run the demo and print the summary; 1 where clients were not better off with the service.

    Args:
        fast: a short run for pipelines.
    """
    console = Console()
    screen: Screen = LiveScreen(console) if console.is_terminal else PlainScreen()
    try:
        summary = uvloop.run(interruptible(perform(FAST if fast else NORMAL, screen)))
    except asyncio.CancelledError:
        note("interrupted; everything that the demo started is stopped")
        return exit_codes.INTERRUPTED
    except ServiceNotStartedError as error:
        note(f"error: {error}")
        return exit_codes.FAILED
    console.print(render(summary))
    if os.environ.get(JSON_VARIABLE) == "1":
        say(json.dumps(summary.as_dict()))
    return exit_codes.OK if summary.is_better else exit_codes.FAILED
