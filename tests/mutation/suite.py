"""The tests as a collected session: which functions each of them runs, and a run of some up to the first failure.

Lives in the driver's process only; everything that runs tests does so in a forked child.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

DOMAIN = "policy_service/domain/"
OPTIONS = ("-o", "addopts=", "-p", "no:terminal", "-p", "no:cacheprovider", "--capture=no", "-o", "timeout=30")
FOLDERS = ("tests/unit", "tests/vectors")
# The command line starts processes, generated files and pages are compared with their source, large files and the
# simulation take seconds: none of them says more about a rule than the tests that stay.
IGNORED = (
    "tests/unit/test_cli.py",
    "tests/unit/test_contract_files.py",
    "tests/unit/test_docs.py",
    "tests/unit/test_catalogue_file.py",
    "tests/unit/test_slow_provider_simulation.py",
)
Function = tuple[str, str, int]
DEAR_S = 1.0  # a single test that costs more is not worth running for each mutant


@dataclass(slots=True)
class Baseline:
    """What the untouched code does: functions run by each test, its cost, and the functions run while importing."""

    functions: dict[str, frozenset[Function]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    dear: list[str] = field(default_factory=list)
    imported: frozenset[Function] = frozenset()


def steady_hypothesis() -> None:
    """The same examples every time, no shrinking: a failure is all that is asked."""
    settings.register_profile(
        "mutation",
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


def function_of(code: CodeType) -> Function:
    """Name of a function that stays the same between processes."""
    name = code.co_filename
    at = name.rfind(DOMAIN)
    return (name[at:] if at >= 0 else "", code.co_qualname, code.co_firstlineno)


@contextmanager
def traced(seen: set[CodeType]) -> Iterator[None]:
    """Collect the code of every function that is entered."""

    def enter(frame: FrameType, _event: str, _arg: object) -> None:
        seen.add(frame.f_code)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def in_domain(seen: set[CodeType]) -> frozenset[Function]:
    """The functions of the domain among them, module bodies left out."""
    return frozenset(function_of(code) for code in seen if DOMAIN in code.co_filename and code.co_name != "<module>")


@lru_cache(maxsize=1)
def caches() -> list[Any]:
    """Caches of the domain; looking for them among all objects takes a tenth of a second."""
    found = (each for each in gc.get_objects() if isinstance(each, _lru_cache_wrapper))
    return [each for each in found if each.__module__.startswith("policy_service.domain")]


def forget_cached() -> None:
    """Empty the caches, so that no test lives on another's work."""
    for each in caches():
        each.cache_clear()


class Outcomes:
    """Listens to the reports of one run."""

    def __init__(self) -> None:
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in set-up or clean-up counts as well."""
        self.failed = self.failed or report.failed


def run_items(items: Sequence[pytest.Item], outcomes: Outcomes) -> str | None:
    """Run in order, stop at the first failure and name it."""
    for at, item in enumerate(items):
        following = items[at + 1] if at + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if outcomes.failed:
            return item.nodeid
    return None


def measured(session: pytest.Session, outcomes: Outcomes) -> Baseline:
    """Run everything once, traced."""
    baseline = Baseline()
    for item in session.items:
        forget_cached()
        seen: set[CodeType] = set()
        started = time.process_time()
        with traced(seen):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        baseline.seconds[item.nodeid] = time.process_time() - started
        baseline.functions[item.nodeid] = in_domain(seen)
        if outcomes.failed:
            baseline.broken.append(item.nodeid)
        elif baseline.seconds[item.nodeid] > DEAR_S:
            baseline.dear.append(item.nodeid)
        outcomes.failed = False
    return baseline


def _quiet() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def in_child(work: Callable[[], Any], cpu_seconds: float, wall_seconds: float, *, quiet: bool = True) -> Any:
    """The picklable result of `work` in a forked process, or None when it died or took longer than it may."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _answer(work, writing, cpu_seconds, quiet=quiet)
    os.close(writing)
    return _received(child, reading, wall_seconds)


def _answer(work: Callable[[], Any], writing: int, cpu_seconds: float, *, quiet: bool) -> None:
    try:
        os.setpgid(0, 0)
        if quiet:
            _quiet()
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + int(cpu_seconds) + 1, used + int(cpu_seconds) + 2))
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(work(), pipe)
    finally:
        os._exit(0)


def _received(child: int, reading: int, wall_seconds: float) -> Any:
    """What the child wrote before it ended; None if that is no whole answer."""
    with os.fdopen(reading, "rb") as pipe:
        os.set_blocking(reading, False)
        data, deadline = b"", time.monotonic() + wall_seconds
        while time.monotonic() < deadline:
            piece = pipe.read()
            if piece == b"":
                break
            data += piece or b""
            time.sleep(0 if piece else 0.005)
    _end(child)
    return pickle.loads(data) if data else None


def _end(child: int) -> None:
    """The child's whole group: a mutant may have started processes of its own."""
    try:
        os.killpg(child, 9)
    except (ProcessLookupError, PermissionError):
        os.kill(child, 9)
    os.waitpid(child, 0)


def arguments(root: Path) -> list[str]:
    """What the session collects."""
    folders = [str(root / each) for each in FOLDERS]
    return [*OPTIONS, *(f"--ignore={root / each}" for each in IGNORED), *folders]
