"""Scores by group with their confidence intervals, and the list of what nobody noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.mutation.accepted import Accepted, accepted
from tests.mutation.groups import GROUPS
from tests.mutation.trials import NO_CODE, SURVIVED, TIMED_OUT, UNCOVERED, Trial

DOMAIN = "policy_service/domain"
GATE = 0.90
Z = 1.96
UNNOTICED = (SURVIVED, UNCOVERED)


def group_of(module: str) -> str:
    """The group whose patterns name the module."""
    name = module.removeprefix(f"{DOMAIN}/").removesuffix(".py")
    return next((group for group, names in GROUPS.items() if any(fnmatch(name, each) for each in names)), "other")


def grouped(root: Path, wanted: Sequence[str]) -> dict[str, list[str]]:
    """Modules by group; `wanted` names groups or patterns of modules, nothing means all."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((root / DOMAIN).rglob("*.py")):
        module = str(path.relative_to(root))
        name = module.removeprefix(f"{DOMAIN}/").removesuffix(".py")
        if not wanted or any(each == group_of(module) or fnmatch(name, each) for each in wanted):
            groups[group_of(module)].append(module)
    return dict(groups)


def interval(killed: int, total: int) -> tuple[float, float]:
    """Wilson's interval of a share, 95 %."""
    if not total:
        return 0.0, 1.0
    share, weight = killed / total, Z * Z / total
    middle = share + weight / 2
    spread = Z * (share * (1 - share) / total + weight / (4 * total)) ** 0.5
    return (middle - spread) / (1 + weight), (middle + spread) / (1 + weight)


@dataclass(slots=True)
class Score:
    """Trials by group, in the order they came."""

    trials: defaultdict[str, list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def add(self, group: str, trials: Iterable[Trial]) -> None:
        """Count what was a program at all."""
        self.trials[group] += [trial for trial in trials if trial.verdict != NO_CODE]

    def failures(self, whole: Container[str]) -> list[str]:
        """Why the gate is not passed; accepted mutants count as survivors here.

        All trials together and each group that was tried to its last mutant have to reach the gate; a group of which
        only some were tried fails if it lies below by more than chance (its 95 % interval ends below the gate).

        Args:
            whole: groups of which every mutant was tried.
        """
        everything = [trial for trials in self.trials.values() for trial in trials]
        if not everything:
            return ["nothing was tried"]
        failed = [] if noticed(everything) >= GATE * len(everything) else ["all groups together"]
        for group, trials in self.trials.items():
            reached = noticed(trials) / max(1, len(trials))
            if (reached if group in whole else interval(noticed(trials), len(trials))[1]) < GATE:
                failed.append(group)
        return failed


def noticed(trials: Sequence[Trial]) -> int:
    """Mutants that a test noticed."""
    return sum(trial.verdict not in UNNOTICED for trial in trials)


def reason_of(trial: Trial) -> Accepted | None:
    """Why a mutant that nobody noticed may stay, if the list has it."""
    name = trial.module.removeprefix(f"{DOMAIN}/").removesuffix(".py")
    return accepted().get((name, trial.change)) if trial.verdict in UNNOTICED else None


def row(name: str, trials: Sequence[Trial]) -> str:
    """One line of the table."""
    total, killed = len(trials), noticed(trials)
    late = sum(trial.verdict == TIMED_OUT for trial in trials)
    excused = sum(reason_of(trial) is not None for trial in trials)
    low, high = interval(killed, total)
    drawn = f"{killed / max(1, total):.1%} | {low:.1%} to {high:.1%}"
    return f"| {name} | {total} | {killed} | {late} | {drawn} | {excused} | {killed / max(1, total - excused):.1%} |"


HEAD = (
    "| group | mutants | killed | of them by time | score | 95 % interval | accepted | score without accepted |",
    "|---|---|---|---|---|---|---|---|",
)


def table(score: Score) -> str:
    """The whole result, as Markdown."""
    everything = [trial for trials in score.trials.values() for trial in trials]
    rows = [row(group, trials) for group, trials in sorted(score.trials.items())]
    left = [trial for trial in everything if trial.verdict in UNNOTICED]
    survivors = [_line(trial) for trial in left if reason_of(trial) is None]
    excused = [f"{_line(trial)}: {why.reason}" for trial in left if (why := reason_of(trial))]
    lists = (("Survivors:", survivors), ("Accepted:", excused))
    listed = (line for name, each in lists for line in ("", name, *each))
    return "\n".join([*HEAD, *rows, row("all", everything), *listed])


def _line(trial: Trial) -> str:
    place = f"{trial.module.removeprefix(DOMAIN + '/')}:{trial.mutant.line}"
    return f"- `{place}` {trial.mutant.operator} ({trial.verdict}): `{trial.change}`"
