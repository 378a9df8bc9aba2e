"""The result as a table for people and as JSON for machines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from policy_service.cli.bench.figures import Figure

_PAPER_COLUMNS: Final = 120


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the figures were taken under; loads are averages over a minute, before and after."""

    cpus: int
    python: str
    client: str
    failure_client: str
    load_before: float
    load_after: float
    seconds: float
    rounds: int


def as_json(conditions: Conditions, figures: list[Figure]) -> str:
    """Everything, rounds included."""
    return json.dumps({"conditions": asdict(conditions), "figures": [f.as_json() for f in figures]}, indent=2)


ECHO: Final = "a bare grpc.aio echo with the same messages"
NO_OP: Final = "an ext_proc server in Python that decides nothing, in the same phases"


def print_table(conditions: Conditions, figures: list[Figure], reference: str = ECHO) -> None:
    """Figures with goals, then how far to trust them.

    Args:
        reference: what the service is held against.
    """
    table = Table(box=box.SIMPLE_HEAD, title=f"policy-service against {reference}")
    table.add_column("figure", no_wrap=True)
    for name in ("service", "reference", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("goal")
    table.add_column("")
    for figure in figures:
        table.add_row(*_row(figure))
    console = Console() if sys.stdout.isatty() else Console(width=_PAPER_COLUMNS)
    console.print(table)
    console.print(_caption(conditions, reference), highlight=False)


def _row(figure: Figure) -> tuple[str, ...]:
    goal = figure.goal.text() if figure.goal else ""
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    return (
        figure.title,
        _value(figure.service, figure.unit),
        _value(figure.reference, figure.unit),
        ratio,
        goal,
        _mark(figure),
    )


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 1_000 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def _mark(figure: Figure) -> str:
    if figure.met is None:
        return "" if figure.goal is None else "not measured"
    return "[green]met[/green]" if figure.met else "[red]missed[/red]"


def _caption(conditions: Conditions, reference: str) -> str:
    load = f"{conditions.load_before:.1f} before, {conditions.load_after:.1f} after"
    return (
        f"Client: {conditions.client}; failures: {conditions.failure_client}. "
        f"{conditions.cpus} CPUs, load {load}, Python {conditions.python}. "
        f"Medians of interleaved rounds, {conditions.seconds:g} s a measurement; "
        f"the reference is {'the echo, for spans the same code without them' if reference is ECHO else reference}. "
        "Ratios travel between machines, absolute figures do not."
    )
