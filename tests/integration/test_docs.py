"""Every command, program and file shown in the documentation is run as it stands there, and prints what is shown.

Each page gets a fresh database, a directory of its own and free ports; SHOWN_ADDRESSES in a block stand for them.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from policy_service.domain.strategies import ROUTE_STRATEGIES
from policy_service.generated.policy.v1 import admin_pb2, policy_pb2
from policy_service.settings.catalogue_file import load_catalogue
from policy_service.settings.load import load
from tests.docs_pages import ROOT, Block, Page, pages
from tests.integration.serving import config, selection, serving
from tests.integration.test_service import free_port
from tests.polyglot.doors import missing_for

SHOWN_ADDRESSES = ("127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:8080", "127.0.0.1:9101", "127.0.0.1:9102")
RUN = ("bash test", "bash install", "python test")
DRY = {"PIP_DRY_RUN": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
"""Nothing is installed; and what is installed builds what is on disk (pip reads the second the wrong way round)."""
RUNNABLE = [page for page in pages() if page.blocks(*RUN, "bash serve", "yaml catalogue", "yaml config")]
_TIME = re.compile(r"\b(\d+) s\b")
_LONGEST_BLOCK_S = 200
"""A first build of the Go gateway on two busy cores."""
_SLACK_S = 45
"""What a countdown may have run on between two lines on a busy machine."""


class Desk:
    """Where one page is worked through: directory, environment, at most one service."""

    def __init__(self, directory: Path, database_url: str) -> None:
        self.directory = directory
        self._real = {shown: f"127.0.0.1:{free_port()}" for shown in SHOWN_ADDRESSES}
        self.address = self._real[SHOWN_ADDRESSES[0]]
        self._service: subprocess.Popen[bytes] | None = None
        self._programs: list[subprocess.Popen[bytes]] = []
        self._log = directory / "serve.log"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("POLICY_", "OTEL_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/local/go/bin",
            "POLICY_DATABASE_URL": database_url.replace("+asyncpg", ""),
            "POLICY_LISTEN_TCP": self.address,
            "POLICY_DATA_DIR": str(directory / "data"),
            "POLICY_DRAIN_MS": "200",
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "120",
        }
        for name in ("proto", "adapters", "constraints.txt"):
            (directory / name).symlink_to(ROOT / name)
        (directory / "docs" / "examples").mkdir(parents=True)
        for path in (ROOT / "docs" / "examples").iterdir():
            (directory / "docs" / "examples" / path.name).symlink_to(path)

    def run(self, block: Block) -> str:
        """Run a block to its end and return what it prints."""
        language = block.tag.split()[0]
        command = {"bash": ["bash", "-euo", "pipefail"], "python": [sys.executable, "-"]}[language]
        done = subprocess.run(
            command,
            input=self._placed(block.text),
            cwd=self.directory,
            env={**self._environment, **(DRY if block.tag == "bash install" else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONGEST_BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n{done.stdout}\n{self.log()}"
        return reduce(lambda text, pair: text.replace(pair[1], pair[0]), self._real.items(), done.stdout)

    def show(self, block: Block) -> None:
        """Put a file that the page shows where its commands find it, with the ports of this desk."""
        file = self.directory / block.file
        file.unlink(missing_ok=True)
        file.write_text(self._placed(block.text))

    def _placed(self, text: str) -> str:
        """The text of a block with the ports of this desk."""
        return reduce(lambda text, pair: text.replace(*pair), self._real.items(), text)

    async def serve(self, block: Block) -> None:
        """Start the service of a `bash serve` block in place of the one before."""
        self.end()
        self._start(self._placed(block.text))
        await self._announced()

    def _start(self, text: str) -> None:
        with self._log.open("w") as log:
            self._service = subprocess.Popen(
                ["bash", "-euc", text.replace("policy-service serve", "exec policy-service serve")],
                cwd=self.directory,
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    async def _announced(self) -> None:
        """Wait until the service says that it serves; a health call would need the keys of the page."""
        async with asyncio.timeout(60):
            while "is serving" not in self.log():
                assert self._service is None or self._service.poll() is None, self.log()
                await asyncio.sleep(0.05)

    def log(self) -> str:
        """What the service wrote last."""
        return self._log.read_text()[-2_000:] if self._log.exists() else ""

    def start(self, block: Block) -> None:
        """Start the program of a `bash start` block; it ends with the page."""
        log = (self.directory / f"start-{len(self._programs)}.log").open("w")
        with log:
            command = ["bash", "-euc", f"exec env {self._placed(block.text)}"]
            started = subprocess.Popen(command, cwd=self.directory, env=self._environment, stdout=log, stderr=log)
        self._programs.append(started)

    def close(self) -> None:
        """Stop everything that the page started."""
        self.end()
        for program in self._programs:
            program.terminate()
            program.wait(20)

    def end(self) -> None:
        """Stop the service, if one runs."""
        if self._service is not None:
            self._service.terminate()
            self._service.wait(20)
            self._service = None


@contextmanager
def desk(directory: Path, database_url: str) -> Iterator[Desk]:
    place = Desk(directory, database_url)
    try:
        yield place
    finally:
        place.close()


def _seconds(text: str) -> list[int]:
    return [int(number) for number in _TIME.findall(text)]


def same(shown: str, printed: str) -> bool:
    """Line by line; `...` stands for anything, and a number of seconds may have run on a little."""
    pattern = re.escape(_TIME.sub("@ s", shown.strip())).replace(re.escape("..."), ".*?")
    if re.fullmatch(pattern, _TIME.sub("@ s", printed.strip()), re.DOTALL) is None:
        return False
    pairs = zip(_seconds(shown), _seconds(printed), strict=False)
    return all(-1 <= then - now <= _SLACK_S for then, now in pairs)


def _difference(shown: str, printed: str) -> str:
    return "\n".join(difflib.unified_diff(shown.splitlines(), printed.splitlines(), "shown", "printed", lineterm=""))


def _check_file(block: Block, directory: Path) -> None:
    if block.tag == "yaml catalogue":
        load_catalogue(block.text, source=block.file or "page", environment={})
    elif block.tag == "yaml config":
        load(file=str(directory / block.file), environment={}, flags={})


async def work_through(page: Page, place: Desk) -> AsyncIterator[tuple[Block, str]]:
    """Do what a page says, in order; each output block with what was really printed."""
    printed = ""
    for block in page.blocks():
        if block.tag in ("yaml file", "json file"):
            place.show(block)
        elif block.file and block.tag.startswith("yaml"):
            (place.directory / block.file).write_text(block.text)
        if block.tag in RUN:
            printed = place.run(block)
        elif block.tag == "bash serve":
            await place.serve(block)
        elif block.tag == "bash start":
            place.start(block)
        elif block.tag == "text output":
            yield block, printed
        else:
            _check_file(block, place.directory)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
async def test_what_a_page_shows_is_what_happens(page: Page, tmp_path: Path, embedded_url: str) -> None:
    missing = missing_for(page.path.stem) if page.path.stem in ("go", "node") else ""
    if missing:
        pytest.skip(missing)
    with desk(tmp_path, embedded_url) as place:
        async for block, printed in work_through(page, place):
            assert same(block.text, printed), f"line {block.line}\n{_difference(block.text, printed)}"


# --- what the README says is not there yet ----------------------------------------------------------------------------
def _listed(beginning: str) -> list[str]:
    """Names in the item of the README that begins so."""
    found = re.search(rf"^\* {beginning}:(.*?)\.$", Page(ROOT / "README.md").text, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no item {beginning!r}"
    return re.findall(r"`([\w-]+)`", found[1])


def _methods() -> Iterator[MethodDescriptor]:
    for file in (policy_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR):
        for service in file.services_by_name.values():
            yield from service.methods


def _code_of(channel: grpc.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    """Status of an empty call."""
    kind = channel.stream_stream if method.client_streaming else channel.unary_unary
    call = kind(f"/{method.containing_service.full_name}/{method.name}")
    try:
        answer = call(iter([b""]) if method.client_streaming else b"", timeout=10)
        if method.client_streaming:
            list(answer)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


async def test_every_call_of_the_contract_is_answered(tmp_path: Path, embedded_url: str) -> None:
    async with serving(config(tmp_path, embedded_url)) as (service, _):
        with grpc.insecure_channel(service.server.addresses[-1]) as channel:
            codes = {m.name: await asyncio.to_thread(_code_of, channel, m) for m in _methods()}
    assert [name for name, code in codes.items() if code is grpc.StatusCode.UNIMPLEMENTED] == []


async def test_the_readme_names_exactly_the_strategies_that_are_refused(tmp_path: Path, embedded_url: str) -> None:
    refused = []
    async with serving(config(tmp_path, embedded_url)) as (_, stub):
        for name in (*ROUTE_STRATEGIES, "quota-share"):
            try:
                await stub.SelectTarget(selection("a", strategy=name))
            except grpc.aio.AioRpcError as error:
                refused += [name] if "unknown strategy" in str(error.details()) else []
    assert _listed("Strategies that are refused with UNKNOWN_STRATEGY") == refused


def test_a_page_that_shows_something_else_is_found() -> None:
    assert same("out: a for 30 s\n...", "out: a for 29 s\nmore")
    assert not same("out: a for 30 s", "out: b for 30 s")
    assert not same("out: a for 300 s", "out: a for 30 s")
    assert not same("one line", "one line\nand another")
