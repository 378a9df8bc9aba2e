"""h2load (nghttp2) as the client: gRPC framing by hand, one request body for all calls.

h2load knows nothing of gRPC statuses, which travel in trailers under an HTTP 200; a failed call shows as an answer
without data, so the bytes received are held against those of a right answer.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from policy_service.cli.bench.load import Sample, Shape, Work
from policy_service.cli.bench.processes import BenchError

FRAME_HEAD: Final = 5
_LEAST_SHARE: Final = 0.8
"""Of the bytes of right answers: those in flight at the end count half, ages and ids differ in length."""
_REQUESTS = re.compile(r"^requests: .* (\d+) done, (\d+) succeeded, (\d+) failed", re.MULTILINE)
_DATA = re.compile(r"\((\d+)\) data$", re.MULTILINE)


class Report(NamedTuple):
    """What h2load says at its end: calls with an HTTP 200, calls without, bytes of data frames."""

    succeeded: int
    failed: int
    data_bytes: int


def parse_report(text: str) -> Report:
    """Read the end of h2load's output. Raises BenchError where it is not as expected."""
    requests, data = _REQUESTS.search(text), _DATA.search(text)
    if requests is None or data is None:
        raise BenchError(f"h2load gave no result: {text[-500:]}")
    return Report(int(requests[2]), int(requests[3]), int(data[1]))


def framed(message: bytes) -> bytes:
    """A gRPC message as it travels: not compressed, with its length."""
    return struct.pack(">BI", 0, len(message)) + message


def available() -> str | None:
    """Path of the program; None where it is not installed."""
    return shutil.which("h2load")


class H2Load:
    """As `Client`. Only for calls whose body is always the same."""

    name = "h2load"

    def __init__(self, program: str) -> None:
        self._program = program

    async def load(self, work: Work, shape: Shape, seconds: float) -> Sample:
        """As `Client`; connecting counts, for both servers alike."""
        with TemporaryDirectory(prefix="policy-bench-") as place:
            body, log = Path(place, "body"), Path(place, "log")
            body.write_bytes(framed(work.body(0)))
            text = await asyncio.to_thread(self._run, _arguments(work, shape, seconds, body, log))
            report = parse_report(text)
            _check(report, work)
            return Sample(report.succeeded, seconds, _latencies(log))

    def _run(self, arguments: list[str]) -> str:
        done = subprocess.run(
            [self._program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        return done.stdout.decode(errors="replace")


def _arguments(work: Work, shape: Shape, seconds: float, body: Path, log: Path) -> list[str]:
    return [
        f"--clients={shape.connections}",
        f"--max-concurrent-streams={shape.streams}",
        "--threads=1",
        f"--duration={round(seconds * 1000)}ms",
        f"--data={body}",
        f"--log-file={log}",
        "--header=content-type: application/grpc",
        "--header=te: trailers",
        f"http://{work.address}{work.path}",
    ]


def _check(report: Report, work: Work) -> None:
    expected = report.succeeded * (work.answer_bytes + FRAME_HEAD)
    if report.failed or report.data_bytes < expected * _LEAST_SHARE:
        raise BenchError(
            f"{work.path}: {report.failed} calls failed, {report.succeeded} were answered with "
            f"{report.data_bytes} bytes instead of {expected}"
        )


def _latencies(log: Path) -> list[float]:
    rows = (line.split("\t") for line in log.read_text().splitlines())
    return [float(row[2]) for row in rows if row[1] == "200"]
