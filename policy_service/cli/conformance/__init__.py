"""`conformance`: does a gateway, written in whatever language, do what an integration has to do?

A scripted policy service and scripted upstreams run on loopback; requests of clients go through the gateway under test;
a pure judge compares what both ends saw with the rules. The service itself is not involved.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from policy_service.cli import exit_codes
from policy_service.cli.conformance import gateway_process, table
from policy_service.cli.conformance.cases import Case, load_cases
from policy_service.cli.conformance.gateway_process import GatewayNotReadyError, Running
from policy_service.cli.conformance.judge import Result, is_judged_in, judge
from policy_service.cli.conformance.record import Record
from policy_service.cli.conformance.rules import Rule, features, load_rules
from policy_service.cli.conformance.scripted_client import GatewayAccess
from policy_service.cli.conformance.scripted_upstreams import PortTakenError
from policy_service.cli.conformance.stage import Stage, staged
from policy_service.cli.interruption import interruptible
from policy_service.cli.output import note, say
from policy_service.settings.server import split_address


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Args:
        target: host:port of a gateway that somebody else starts; empty: `command` is run.
        command: command line of the shell that starts the gateway.
        only: rules to judge; empty: all.
        cases: cases to play; empty: those that the rules need.
        without: features that the gateway does without.
        base_port: of the stage; 0: free ports.
        wait_s: how long the gateway may take to listen.
        log: file for what the gateway prints; None: only its end is shown, where it ends too early.
        access: how clients reach it; the address is filled in.
    """

    target: str = ""
    command: str = ""
    only: Sequence[str] = ()
    cases: Sequence[str] = ()
    without: Sequence[str] = ()
    base_port: int = 0
    wait_s: float = 60.0
    log: Path | None = None
    access: GatewayAccess = field(default_factory=lambda: GatewayAccess(""))


class UsageError(Exception):
    """The command line cannot be followed."""


def show_rules() -> int:
    """Print every rule."""
    for line in table.listed(load_rules()):
        say(line)
    return exit_codes.OK


def run(options: Options, *, as_json: bool) -> int:
    """Judge a gateway; 1 where it breaks a rule that must be kept, or does not start."""
    try:
        rules, cases = chosen(options)
        results = asyncio.run(interruptible(examine(options, rules, cases)))
    except asyncio.CancelledError:
        note("interrupted; everything that the kit started is stopped")
        return exit_codes.INTERRUPTED
    except UsageError as error:
        note(f"error: {error}")
        return exit_codes.CONFIGURATION
    except (GatewayNotReadyError, PortTakenError) as error:
        note(f"error: {error}")
        return exit_codes.FAILED
    for line in [table.as_json(results)] if as_json else table.lines(results):
        say(line)
    return exit_codes.FAILED if any(result.is_breach for result in results) else exit_codes.OK


def chosen(options: Options) -> tuple[list[Rule], list[Case]]:
    """Rules to judge and cases to play.

    Raises:
        UsageError: a name that there is not, or neither or both of target and command.
    """
    rules, cases = load_rules(), load_cases()
    _known("rule", options.only, [rule.id for rule in rules])
    _known("case", options.cases, [case.name for case in cases])
    _known("feature", options.without, features(rules))
    if bool(options.target) == bool(options.command):
        raise UsageError("give either --target host:port or --command")
    if options.target:
        _require_address(options.target)
    if options.log:
        _require_writable(options.log)
    wanted = [rule for rule in rules if not options.only or rule.id in options.only]
    judged = [rule for rule in wanted if rule.feature not in options.without]
    needed = [case for case in cases if any(is_judged_in(rule, case) for rule in judged)]
    return wanted, [case for case in needed if not options.cases or case.name in options.cases]


def _require_address(target: str) -> None:
    try:
        split_address(target)
    except ValueError:
        raise UsageError(f"--target is host:port, not {target}; such as 127.0.0.1:8080") from None


def _require_writable(log: Path) -> None:
    try:
        log.open("wb").close()
    except OSError as error:
        raise UsageError(f"--log {log} cannot be written: {error.strerror}; name a file in a directory") from None


def _known(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"no {kind} of the name {', '.join(unknown)}; there are: {', '.join(known)}")


async def examine(options: Options, rules: Sequence[Rule], cases: Sequence[Case]) -> list[Result]:
    """Set the stage, play the cases, judge.

    Raises:
        GatewayNotReadyError: the gateway does not listen.
    """
    with TemporaryDirectory(prefix="policy-conformance-") as name:
        async with staged(options.base_port) as stage, _gateway(options, stage, Path(name)) as gateway:
            records = await _play(options, stage, cases, gateway)
    return judge(rules, records, options.without)


async def _play(options: Options, stage: Stage, cases: Sequence[Case], gateway: Running) -> list[Record]:
    """Every case; a gateway that ends on the way ends the run."""
    access = replace(options.access, address=gateway.address)
    records = []
    for case in cases:
        if sys.stderr.isatty():
            note(f"case {case.name}")
        records.append(await stage.play(case, access))
        try:
            gateway.must_run()
        except GatewayNotReadyError as error:
            raise GatewayNotReadyError(f"in case {case.name}, {error}") from None
    return records


@asynccontextmanager
async def _gateway(options: Options, stage: Stage, place: Path) -> AsyncIterator[Running]:
    """The gateway under test, once it takes connections."""
    listen = "" if options.target else f"127.0.0.1:{_free_port()}"
    variables = gateway_process.environment(stage, place, listen, options.access.key)
    if options.command:
        log = options.log or place / "gateway.log"
        async with gateway_process.started(options.command, variables, log, options.wait_s) as gateway:
            yield gateway
        return
    for name, value in variables.items():
        note(f"{name}={value}")
    note(f"waiting for a gateway at {options.target}, for {options.wait_s:.0f} s")
    gateway = Running(options.target)
    await gateway_process.listening(gateway, options.wait_s)
    yield gateway


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
