"""The gate itself: collect the tests once, measure them, spend them on mutants. Runs inside a private copy only."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import CodeType

import pytest

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.report import UNNOTICED, Score, group_of, grouped, table
from tests.mutation.suite import Outcomes, arguments, caches, in_child, in_domain, measured, steady_hypothesis, traced
from tests.mutation.trials import Bench, Trial

ROOT = Path.cwd()
DAY_S = 86_400.0


def options(given: Sequence[str]) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description="Mutation score of policy_service/domain.")
    parser.add_argument("--module", action="append", default=[], help="group, module or pattern; may be repeated")
    parser.add_argument("--sample", type=int, default=0, help="mutants a group at most; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--minutes", type=float, default=0, help="stop after; what is left is not counted")
    parser.add_argument("--report", default="", help="append all trials to this file, as JSON lines")
    parser.add_argument(
        "--again", default="", help="a report: what was noticed there in a file that has not changed since is settled"
    )
    return parser.parse_args(given)


@cache
def source_of(module: str) -> str:
    """Digest of a file: a trial is worth nothing once the file has changed."""
    path = ROOT / module
    return sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def earlier(path: str) -> list[Trial]:
    """Trials of a report whose files are still the same, in order; none where there is no report yet."""
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [
        Trial(each["module"], Mutant(**each["mutant"]), each["change"], each["verdict"], each["by"])
        for each in found
        if each.get("source") == source_of(each["module"])
    ]


def sampled(asked: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Module and mutant of each trial; the seed and the group fix the draw."""
    trials: list[tuple[str, Mutant]] = []
    for group, modules in grouped(ROOT, asked.module).items():
        found = [(module, each) for module in modules for each in mutants((ROOT / module).read_text("utf-8"))]
        random.Random(f"{asked.seed} {group}").shuffle(found)
        trials += found[: asked.sample or None]
    return trials


class Gate(Outcomes):
    """A pytest plugin that takes the collected session and spends it on mutants."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.asked = asked
        self.imported: set[CodeType] = set()
        self.score = Score()
        self.whole: set[str] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of a plain run."""
        sys.settrace(None)
        baseline = in_child(lambda: measured(session, self), DAY_S, DAY_S)
        baseline.imported = in_domain(self.imported)
        print(f"baseline: {len(baseline.functions)} tests, {sum(baseline.seconds.values()):.0f} s traced", flush=True)
        print("".join(f"  left out, fails as it is: {nodeid}\n" for nodeid in baseline.broken), end="", flush=True)
        print("".join(f"  left out, dear: {nodeid}\n" for nodeid in baseline.dear), end="", flush=True)
        bench = Bench(ROOT, session, self, baseline)
        caches()
        gc.freeze()  # children need not look through what they share
        self._spend(bench)
        return True

    def _spend(self, bench: Bench) -> None:
        known = {(each.module, each.mutant): each for each in earlier(in_folder(self.asked.again))}
        noticed = {key: trial for key, trial in known.items() if trial.verdict not in UNNOTICED}
        drawn = sampled(self.asked)
        for key in drawn:
            if key in noticed:
                self.score.add(group_of(key[0]), [noticed[key]])
        work = [key for key in drawn if key not in noticed]
        shards = [work[at :: self.asked.jobs] for at in range(self.asked.jobs)]
        deadline, tried = time.monotonic() + (self.asked.minutes * 60 or DAY_S), 0
        for trials in _together(bench, shards, in_folder(self.asked.report) or os.devnull, deadline):
            for trial in trials:
                self.score.add(group_of(trial.module), [trial])
                tried += 1
        self.whole = (
            {group_of(module) for module, _ in drawn} if not self.asked.sample and tried == len(work) else set()
        )


def in_folder(name: str) -> str:
    """A file named on the command line, which was read in another folder."""
    return os.path.join(os.environ.get("MUTATION_REPORT_FOLDER", "."), name) if name else ""


def _together(
    bench: Bench, shards: Sequence[Sequence[tuple[str, Mutant]]], report: str, deadline: float
) -> Iterator[list[Trial]]:
    """All shards at the same time: a thread waits for the process of each."""
    works = [partial(_tried, bench, shard, report, deadline) for shard in shards]
    if len(works) == 1:
        return iter([works[0]()])
    with ThreadPoolExecutor(len(works)) as pool:
        return iter(list(pool.map(lambda work: in_child(work, DAY_S, DAY_S), works)))


def _tried(bench: Bench, shard: Sequence[tuple[str, Mutant]], report: str, deadline: float) -> list[Trial]:
    trials: list[Trial] = []
    for module, mutant in shard:
        if time.monotonic() > deadline:
            break
        started = time.monotonic()
        trials.append(bench.try_out(module, mutant))
        extra = {"seconds": round(time.monotonic() - started, 2), "source": source_of(module)}
        with open(report, "a", encoding="utf-8") as out:
            out.write(json.dumps(extra | asdict(trials[-1])) + "\n")
    return trials


def main(given: Sequence[str]) -> int:
    """0 if the gate is passed (`Score.failures`)."""
    gate = Gate(options(given))
    steady_hypothesis()
    with traced(gate.imported):
        code = pytest.main(arguments(ROOT), plugins=[gate])
    failures = gate.score.failures(gate.whole)
    print(table(gate.score), *(f"below the gate: {each}" for each in failures), sep="\n")
    return int(code) or 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
