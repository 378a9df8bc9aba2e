"""The two runs side by side, measured: what clients saw, what upstreams saw, what the service cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from policy_service.cli.demo.board import Board
from policy_service.cli.demo.client import PolicyClient
from policy_service.cli.demo.gateway import ServiceGateway
from policy_service.cli.demo.traffic import ROUTE_SHARES, Score, middle, ninety_fifth
from policy_service.cli.demo.upstreams import Upstreams


@dataclass(frozen=True, slots=True)
class Side:
    """What one gateway's clients and upstreams saw."""

    requests: int
    failures: int
    failures_by_route: Mapping[str, int]
    upstream_calls: int
    wasted_calls: int
    latency_p50_ms: float
    latency_p95_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of the demo. Times in ms, measured by the gateway."""

    with_service: Side
    without_service: Side
    added_p50_ms: float
    added_p95_ms: float
    select_p50_ms: float
    service_errors: int
    decisions: Mapping[str, int]
    facts: Mapping[str, int]
    restated: int

    @property
    def is_better(self) -> bool:
        """The clients of the service's gateway saw fewer failures."""
        return self.with_service.failures < self.without_service.failures

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "with_service": _as_dict(self.with_service),
            "without_service": _as_dict(self.without_service),
            "added_p50_ms": round(self.added_p50_ms, 3),
            "added_p95_ms": round(self.added_p95_ms, 3),
            "select_p50_ms": round(self.select_p50_ms, 3),
            "service_errors": self.service_errors,
            "decisions": dict(self.decisions),
            "facts": dict(self.facts),
            "restated": self.restated,
            "is_better": self.is_better,
        }


def _as_dict(side: Side) -> dict[str, Any]:
    return {
        "requests": side.requests,
        "failures": side.failures,
        "failures_by_route": dict(side.failures_by_route),
        "upstream_calls": side.upstream_calls,
        "wasted_calls": side.wasted_calls,
        "latency_p50_ms": round(side.latency_p50_ms, 3),
        "latency_p95_ms": round(side.latency_p95_ms, 3),
    }


def side(score: Score, upstreams: Upstreams) -> Side:
    """Count one side."""
    return Side(
        score.requests,
        score.failures.total(),
        {route: score.failures[route] for route in ROUTE_SHARES},
        upstreams.calls,
        upstreams.wasted,
        middle(score.latencies_ms),
        ninety_fifth(score.latencies_ms),
    )


def summarize(ours: Side, theirs: Side, gateway: ServiceGateway, client: PolicyClient, board: Board) -> Summary:
    """Put everything that was measured together."""
    return Summary(
        ours,
        theirs,
        middle(gateway.added_ms),
        ninety_fifth(gateway.added_ms),
        middle(client.select_ms),
        gateway.service_errors,
        dict(board.verdicts),
        dict(board.mechanisms),
        board.restated,
    )


def render(summary: Summary) -> RenderableType:
    """The summary for people."""
    ours, theirs = summary.with_service, summary.without_service
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("same requests, same upstreams, same time")
    table.add_column("with the service", justify="right", style="green")
    table.add_column("without", justify="right", style="red")
    table.add_row("client requests", str(ours.requests), str(theirs.requests))
    table.add_row("[bold]client-visible failures[/]", _share(ours.failures, ours), _share(theirs.failures, theirs))
    for route, failures in theirs.failures_by_route.items():
        table.add_row(f"  [dim]of these on route {route}[/]", str(ours.failures_by_route[route]), str(failures))
    table.add_row("upstream calls", str(ours.upstream_calls), str(theirs.upstream_calls))
    table.add_row("[bold]  wasted on blocked targets[/]", str(ours.wasted_calls), str(theirs.wasted_calls))
    table.add_row("client latency p50", f"{ours.latency_p50_ms:.1f} ms", f"{theirs.latency_p50_ms:.1f} ms")
    table.add_row(
        "client latency p95, waits included", f"{ours.latency_p95_ms:.1f} ms", f"{theirs.latency_p95_ms:.1f} ms"
    )
    table.add_row("added by the service p50 (p95)", f"{summary.added_p50_ms:.2f} ({summary.added_p95_ms:.1f}) ms", "-")
    return Panel(Group(table, *_remarks(summary)), title="summary", title_align="left", expand=False)


def _share(count: int, of: Side) -> str:
    return f"[bold]{count}[/] ({100 * count / max(1, of.requests):.1f} %)"


def _remarks(summary: Summary) -> list[Text]:
    facts = ", ".join(f"{count} {name}" for name, count in sorted(summary.facts.items()))
    decided = ", ".join(f"{count} {name}" for name, count in sorted(summary.decisions.items()))
    lines = [
        Text(f"decisions: {decided}; facts recorded: {facts}; {summary.restated} misstated answers restated"),
        Text(
            "without: round robin in a fixed order, one retry, no memory. wasted: the trouble had been shown before.",
            "dim",
        ),
    ]
    if summary.service_errors:
        lines.append(
            Text(f"{summary.service_errors} client requests ended because a call to the service failed", "bold red")
        )
    return lines
