"""Pages of the documentation as data: fenced blocks, links, and what may be said in them.

The word behind the language of a block says what a test does with it:

    bash test           run by a shell, in order; a `text output` block behind it is what it prints
    bash install        run with pip's dry run: every file, extra and package is there, and nothing is changed
    bash serve          `policy-service serve ...`: started for the blocks behind it, in place of the one before
    bash start          another program that runs on for the blocks behind it, until the end of the page
    python test         run like `bash test`
    yaml catalogue F    loaded as a catalogue, and written to file F for the blocks behind it
    yaml config F       loaded as a process configuration, and written to file F
    yaml shape          read as YAML, not used
    yaml file F         what file F of the repository says, word for word; json file F likewise
    bash by-hand        not run (it changes the host, or takes minutes); make targets and flags named in it are checked
    go, javascript      not run here; every name of the contract in it is checked
    text, ini, json     shown only
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = frozenset({"configuration.md", "signals-and-rules.md", "benchmark.md"})
TAGS = frozenset(
    {
        "bash test",
        "bash install",
        "bash serve",
        "bash start",
        "bash by-hand",
        "python test",
        "yaml catalogue",
        "yaml config",
        "yaml shape",
        "yaml file",
        "json file",
        "text output",
        "text",
        "ini",
        "json",
        "go",
        "javascript",
    }
)
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: what to do with it, the file it names, its text and its line."""

    tag: str
    file: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def blocks(self, *tags: str) -> list[Block]:
        """Blocks in order; with `tags` only those."""
        return [block for block in self._blocks() if not tags or block.tag in tags]

    def _blocks(self) -> Iterator[Block]:
        for match in _BLOCK.finditer(self.text):
            language, words, text = match[1], match[2].split(), match[3]
            tag = f"{language} {words[0]}" if words else language
            yield Block(tag, words[1] if len(words) > 1 else "", text, self.text.count("\n", 0, match.start()) + 1)

    def links(self) -> list[str]:
        """Targets of links inside the repository."""
        prose = _BLOCK.sub("", self.text)
        return [link for link in _LINK.findall(prose) if "://" not in link and not link.startswith("mailto:")]

    def anchors(self) -> set[str]:
        """Anchors of the headings, as the usual renderers make them."""
        headings = _HEADING.findall(_BLOCK.sub("", self.text))
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _is_written(path: Path) -> bool:
    """By a person of this project, not by a program or with a package."""
    return path.name not in GENERATED and "node_modules" not in path.parts


def pages() -> list[Page]:
    """README, CHANGELOG and every page below docs that a person wrote."""
    written = [path for path in sorted((ROOT / "docs").rglob("*.md")) if _is_written(path)]
    return [Page(ROOT / "README.md"), Page(ROOT / "CHANGELOG.md"), *map(Page, written)]
