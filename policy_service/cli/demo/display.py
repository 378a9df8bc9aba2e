"""The live display: one frame of the scene as Rich renderables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Final

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from policy_service.cli.demo.board import TERMINAL, Block, Breaker, Decision, Outcome
from policy_service.cli.demo.scene import Scene
from policy_service.cli.demo.script import CONNECTIONS, Pace
from policy_service.cli.demo.traffic import middle

_BAR: Final = 6
_FIXED_ROWS: Final = 19
"""Rows of a frame besides decisions and outcomes."""
_BREAKER_STYLE: Final = {"CLOSED": "green", "DEGRADED": "yellow", "OPEN": "bold red", "HALF_OPEN": "bold yellow"}
_VERDICT_STYLE: Final = {"dispatch": "green", "wait": "yellow", "reject": "red"}
_COLUMNS: Final = (
    ("provider", 11, 0),
    ("breaker", 14, 0),
    ("connection", 15, 0),
    ("really answers", 17, 106),
    ("the service says", None, 0),
    ("calls\nwith / without", 14, 145),
    ("wasted\nwith / without", 14, 96),
)
"""Title, width (None: what is left), and the terminal width from which on a column is shown."""
_REASONS: Final = {
    "connection": "cooling",
    "connection_cooldown": "cooling",
    "model_lock": "locked",
    "model_lockout": "locked",
    "circuit_open": "breaker open",
    "probe_in_flight": "probe in flight",
    "request_exhaustion": "tried already",
    "credits_exhausted": "wallet empty",
    "expired": "key dead",
    "quota_exhausted": "quota",
    "return_to_client": "answer the client",
    "fall_back": "next target",
}


class LiveScreen:
    """A screen on a terminal, drawn over and over."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def every_s(self, pace: Pace) -> float:
        """Fast enough for countdowns to run smoothly."""
        return 0.125

    @contextmanager
    def open(self) -> Iterator[Callable[[Scene], None]]:
        """Draw each scene over the last one; the last one stays."""
        with Live(console=self._console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda scene: live.update(frame(scene, self._console.size), refresh=True)


def frame(scene: Scene, size: ConsoleDimensions) -> RenderableType:
    """The whole picture for a terminal of this size."""
    rows = max(3, (size.height - _FIXED_ROWS) // 2)
    return Group(_head(scene), _connections(scene, size.width), _decisions(scene, rows), _outcomes(scene, rows))


def words(reason: str) -> str:
    """A reason in words."""
    return _REASONS.get(reason, reason.replace("_", " "))


def _head(scene: Scene) -> RenderableType:
    done = min(scene.elapsed_s, scene.pace.length_s)
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column()
    grid.add_column(ratio=1)
    grid.add_column(justify="right")
    bar = ProgressBar(total=scene.pace.length_s, completed=done, complete_style="cyan", finished_style="cyan")
    grid.add_row(Text("policy-service demo", "bold cyan"), bar, f"{done:.0f} of {scene.pace.length_s:.0f} s")
    return Group(grid, _score(scene))


def _score(scene: Scene) -> RenderableType:
    ours, theirs = scene.ours.failures.total(), scene.theirs.failures.total()
    parts = (
        Text(f"{scene.ours.requests} requests"),
        Text.assemble("failures ", _versus(ours, theirs)),
        Text.assemble("wasted calls ", _versus(scene.our_upstreams.wasted, scene.their_upstreams.wasted)),
        Text(f"added p50 {middle(scene.added_ms):.1f} ms"),
    )
    line = Text("  ").join(parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _versus(ours: int, theirs: int) -> Text:
    return Text.assemble((f"{ours} with", "bold green"), " / ", (f"{theirs} without", "bold red"))


def _connections(scene: Scene, width: int) -> RenderableType:
    shown = [width >= least for _, _, least in _COLUMNS]
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    for title, cells, _ in compress(_COLUMNS, shown):
        table.add_column(title, width=cells, ratio=None if cells else 1, no_wrap=True, header_style="bold")
    before = ""
    for connection, provider in CONNECTIONS.items():
        row = (*_provider(scene, provider if provider != before else ""), *_connection(scene, connection))
        table.add_row(*compress(row, shown))
        before = provider
    return table


def _provider(scene: Scene, provider: str) -> tuple[Text, Text]:
    return Text(provider), _breaker(scene, scene.board.breaker(provider)) if provider else Text()


def _breaker(scene: Scene, breaker: Breaker) -> Text:
    text = Text(f"● {breaker.state}", _BREAKER_STYLE.get(breaker.state, ""))
    left = scene.board.left_ms(breaker.until)
    return text.append(f" {left / 1000:.1f} s") if breaker.state == "OPEN" else text


def _connection(scene: Scene, connection: str) -> tuple[Text, ...]:
    found = scene.our_upstreams.now(connection)
    ours, theirs = scene.our_upstreams.tallies[connection], scene.their_upstreams.tallies[connection]
    return (
        Text(connection),
        Text(found.behaviour.label, "red" if found.is_trouble else "green"),
        _status(scene, connection),
        Text(f"{ours.calls:>4} / {theirs.calls}", "dim"),
        Text.assemble((f"{ours.wasted:>4}", "green"), " / ", (str(theirs.wasted), "red")),
    )


def _status(scene: Scene, connection: str) -> Text:
    block = scene.board.block(connection)
    if block is None:
        return Text("● in use", "green")
    if block.reason in TERMINAL:
        return Text(f"■ {words(block.reason)}, needs a person", "bold red")
    return Text.assemble(
        (f"▲ {words(block.reason)} ", "yellow"), _countdown(scene, block), (_cause(scene, connection, block), "dim")
    )


def _countdown(scene: Scene, block: Block) -> Text:
    if not block.until:
        return Text()
    left = scene.board.left_ms(block.until)
    full = min(_BAR, -(-left * _BAR // max(1, block.length_ms, left)))
    return Text.assemble(
        (f"{left / 1000:.1f} s ", "bold yellow"), ("━" * full, "yellow"), ("━" * (_BAR - full), "grey30")
    )


def _cause(scene: Scene, connection: str, block: Block) -> str:
    cause = scene.board.causes.get(connection, "")
    return f" {words(cause)}" if cause and block.reason != "circuit_open" else ""


def _decisions(scene: Scene, rows: int) -> RenderableType:
    grid = _grid(7)
    for each in list(scene.board.decisions)[-rows:]:
        grid.add_row(*_decision(scene, each))
    return _panel(grid, "decisions", "where to, why, and why not elsewhere", rows)


def _decision(scene: Scene, each: Decision) -> tuple[Text, ...]:
    others = Text("; ".join(_not_there(scene, *other) for other in each.others), "dim")
    return (
        Text(f"{each.at_s:5.1f}", "dim"),
        _times(each.times),
        Text(each.route, "cyan"),
        Text(each.verdict, _VERDICT_STYLE.get(each.verdict, "")),
        Text(each.where, "bold"),
        Text(each.why.removeprefix("strategy "), "magenta"),
        Text("not ", "dim").append(others) if each.others else Text(),
    )


def _not_there(scene: Scene, connection: str, block: Block) -> str:
    left = f" {block.length_ms / 1000:.1f} s" if block.length_ms else ""
    return f"{connection}: {words(block.reason)}{left}"


def _outcomes(scene: Scene, rows: int) -> RenderableType:
    grid = _grid(6)
    for each in list(scene.board.outcomes)[-rows:]:
        grid.add_row(*_outcome(each))
    return _panel(grid, "outcomes", "what came back, what it meant, what was recorded", rows)


def _outcome(each: Outcome) -> tuple[Text, ...]:
    came = Text(each.came_back, "red" if not each.came_back.startswith("2") else "green")
    if each.restated and each.restated != each.came_back:
        came.append(f" → {each.restated}", "bold yellow")
    return (
        Text(f"{each.at_s:5.1f}", "dim"),
        _times(each.times),
        Text(each.connection, "bold"),
        came,
        Text.assemble((words(each.reason), "magenta"), (f" → {words(each.action)}", "")),
        Text("; ".join(each.effects) or "known already, nothing to record", "dim"),
    )


def _panel(grid: Table, title: str, meaning: str, rows: int) -> Panel:
    return Panel(grid, title=f"[bold]{title}[/]  {meaning}", title_align="left", height=rows + 2)


def _times(number: int) -> Text:
    return Text(f"{number}×" if number > 1 else "", "cyan", justify="right")


def _grid(columns: int) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    for number in range(columns):
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1 if number == columns - 1 else None)
    return grid
