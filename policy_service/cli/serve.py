"""`serve`: one process, or a parent that watches several workers sharing a port."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from types import FrameType

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from policy_service import bootstrap
from policy_service.bootstrap import Service, Worker
from policy_service.cli import exit_codes
from policy_service.cli.errors import report_error
from policy_service.cli.output import counted
from policy_service.settings.server import ServerConfig
from policy_service.transport.grpc.listeners import TcpAddress, require_free_port

RESTART_PAUSE_S = 1.0
"""A worker that ends by itself is started again after this pause."""


def run(config: ServerConfig, environment: Mapping[str, str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    for text in config.listen.tcp:  # first of all: a start that must fail changes nothing
        require_free_port(TcpAddress.parse(text))
    if config.workers == 1:
        return bootstrap.serve(config, environment, announce)
    return _Parent(config, environment).run()


def announce(service: Service) -> None:
    """Say where the service listens, what it uses, and what to try next."""
    if service.worker.index:
        return
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(service):
        facts.add_row(f"[bold]{name}[/bold]", value)
    Console(stderr=True).print(Panel(facts, title="policy-service is serving", title_align="left", expand=False))


def _facts(service: Service) -> list[tuple[str, str]]:
    policy = service.replica.view.policy
    revision = f"{policy.revision}" if policy.revision else "none stored; built-in providers"
    routes = counted(len(policy.catalogue.routes), "route")
    connections = counted(len(policy.catalogue.connections), "connection")
    rows = [
        ("address", ", ".join(service.server.addresses)),
        ("database", service.database),
        ("catalogue", f"revision {revision} ({routes}, {connections})"),
        ("replica", service.name),
        ("try next", f"{_healthcheck(service)} · policy-service demo · policy-service classify < errors.jsonl"),
    ]
    if service.config.envoy.enabled:
        rows.insert(1, ("envoy", "external processing on the same addresses"))
    if service.taken_over:
        rows.insert(-2, ("spool", f"{service.taken_over} reports of an earlier run are being committed"))
    return rows


def _healthcheck(service: Service) -> str:
    """The command that asks this service, with its address where it is not the usual one."""
    address = service.server.addresses[0]
    usual = ServerConfig().listen.tcp
    return "policy-service healthcheck" + ("" if address in usual else f" --address {address}")


def _end_with_parent() -> None:
    """Nobody would watch or stop a worker whose parent was killed, and it would keep the port."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by a parent"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _work(config: ServerConfig, environment: Mapping[str, str], worker: Worker) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a terminal's Ctrl-C reaches both
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    try:
        code = bootstrap.serve(config, environment, announce, worker)
    except Exception as error:
        code = report_error(error)
    sys.exit(code)


class _Parent:
    """Starts the workers, starts a lost one again, hands signals on."""

    def __init__(self, config: ServerConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._environment = dict(environment)
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, BaseProcess] = {}
        self._is_ending = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGHUP, lambda *_: self._signal(signal.SIGHUP))
        for index in range(self._config.workers):
            self._start(index)
        while not self._is_over():
            self._watch()
        return max(exit_codes.OK, *(worker.exitcode or 0 for worker in self._workers.values()))

    def _is_over(self) -> bool:
        """Every worker ended, by itself or because it was to; workers that were lost together are started again."""
        codes = [worker.exitcode for worker in self._workers.values()]
        return None not in codes and (self._is_ending or not any(codes))

    def _start(self, index: int) -> None:
        if self._is_ending:  # told so during the pause
            return
        arguments = (self._config, self._environment, Worker(index, self._config.workers))
        worker = self._context.Process(target=_work, args=arguments, name=f"policy-service worker {index}")
        worker.start()
        self._workers[index] = worker
        if self._is_ending:  # told so before this worker was known
            self._signal(signal.SIGTERM)

    def _watch(self) -> None:
        for index, worker in list(self._workers.items()):
            worker.join(timeout=0.2)
            if worker.exitcode in (exit_codes.CONFIGURATION, exit_codes.SCHEMA) and not self._is_ending:
                self._end(signal.SIGTERM, None)  # another start would meet the same
            elif worker.exitcode and not self._is_ending:
                print(f"worker {index} ended with {worker.exitcode}; starting it again", file=sys.stderr)
                time.sleep(RESTART_PAUSE_S)
                self._start(index)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)
