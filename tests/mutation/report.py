"""Scores by group with their confidence intervals, and the list of what nobody noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.mutation.groups import GROUPS
from tests.mutation.trials import NO_CODE, SURVIVED, TIMED_OUT, UNCOVERED, Trial

DOMAIN = "policy_service/domain"
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

    def share(self, group: str) -> float:
        """Noticed mutants of a group."""
        found = self.trials[group]
        return sum(trial.verdict not in UNNOTICED for trial in found) / len(found) if found else 1.0

    def lowest(self) -> float:
        """The group that does worst decides."""
        return min(map(self.share, self.trials), default=1.0)


def row(name: str, trials: Sequence[Trial]) -> str:
    """One line of the table."""
    total, late = len(trials), sum(trial.verdict == TIMED_OUT for trial in trials)
    killed = sum(trial.verdict not in UNNOTICED for trial in trials)
    low, high = interval(killed, total)
    share = killed / total if total else 1.0
    return f"| {name} | {total} | {killed} | {late} | {share:.1%} | {low:.1%} to {high:.1%} |"


def table(score: Score) -> str:
    """The whole result, as Markdown."""
    head = ["| group | mutants | killed | of them by time | score | 95 % interval |", "|---|---|---|---|---|---|"]
    rows = [row(group, trials) for group, trials in score.trials.items()]
    everything = [trial for trials in score.trials.values() for trial in trials]
    left = [
        f"- `{trial.module.removeprefix(DOMAIN + '/')}:{trial.mutant.line}` {trial.mutant.operator} ({trial.verdict}): "
        f"`{trial.change}`"
        for trial in everything
        if trial.verdict in UNNOTICED
    ]
    return "\n".join([*head, *rows, row("all", everything), "", *left])
