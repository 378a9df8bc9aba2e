"""Runs pages of the documentation and writes into them what their commands print.

    python -m tests.rewrite_pages README.md docs/concepts/breaker.md

For whoever changes what a command prints: look at the difference before you keep it. `...` in an output block is
kept as it stands where the page would still pass.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from policy_service.storage.postgres import schema
from policy_service.storage.postgres.embedded import EmbeddedServer
from tests.docs_pages import ROOT, Page
from tests.integration.test_docs import desk, same, work_through

_OUTPUT = re.compile(r"^```text output\n(.*?)^```$", re.MULTILINE | re.DOTALL)


async def rewrite(page: Page) -> None:
    """Bring the output blocks of one page up to date."""
    with tempfile.TemporaryDirectory(prefix="page-") as name, EmbeddedDatabase(Path(name) / "database") as url:
        await schema.upgrade(url)
        with desk(Path(name), url) as place:
            printed = [text async for _, text in work_through(page, place)]
    found = iter(printed)
    page.path.write_text(_OUTPUT.sub(lambda match: _block(match[1], next(found)), page.text), encoding="utf-8")


def _block(shown: str, printed: str) -> str:
    return f"```text output\n{shown if same(shown, printed) else printed.rstrip() + chr(10)}```"


class EmbeddedDatabase:
    """A server for one page."""

    def __init__(self, directory: Path) -> None:
        self._server = EmbeddedServer.open(str(directory), {"fsync": "off"})

    def __enter__(self) -> str:
        return self._server.url

    def __exit__(self, *error: object) -> None:
        self._server.close()


def _named(names: list[str]) -> Iterator[Page]:
    yield from (Page((ROOT / name).resolve()) for name in names)


if __name__ == "__main__":
    for each in _named(sys.argv[1:]):
        asyncio.run(rewrite(each))
        print(f"wrote {each.name}")
