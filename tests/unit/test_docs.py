"""What the documentation names exists: links, files, make targets, settings, names of the contract."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import pytest
import yaml
from google.protobuf.descriptor import Descriptor

from policy_service.domain import classification, guards, rule_linter, verdict
from policy_service.domain.settings import REGISTRY
from policy_service.domain.strategies import IMPLEMENTED_STRATEGIES, ROUTE_STRATEGIES
from policy_service.generated.policy.v1 import (
    admin_pb2,
    lease_pb2,
    permit_pb2,
    policy_pb2,
    reasons_pb2,
    stream_pb2,
    types_pb2,
)
from policy_service.settings import rule_meanings
from policy_service.settings.fields import server_fields
from tests.docs_pages import ROOT, TAGS, Page, pages

PAGES = pages()
FILES = tuple(
    module.DESCRIPTOR for module in (policy_pb2, types_pb2, reasons_pb2, lease_pb2, permit_pb2, stream_pb2, admin_pb2)
)
MECHANISM_PAGES = (
    "breaker",
    "provider-cooldown",
    "connection-cooldown",
    "terminal-states",
    "classification",
    "retry-hints",
    "restatement-and-rules",
    "model-lockout",
    "egress-lock",
    "guards",
    "selection-and-routes",
    "tokens-and-reports",
    "fleet",
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_every_block_says_what_a_test_does_with_it(page: Page) -> None:
    assert [(block.line, block.tag) for block in page.blocks() if block.tag not in TAGS] == []


@every_page
def test_every_link_leads_somewhere(page: Page) -> None:
    assert [link for link in page.links() if not _leads_somewhere(page, link)] == []


def _leads_somewhere(page: Page, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    return target.exists() and (not anchor or anchor in Page(target).anchors())


@every_page
def test_every_file_named_in_code_marks_exists(page: Page) -> None:
    named = re.findall(r"`((?:docs|tests|policy_service|proto|migrations|adapters)/[\w./-]+)`", page.text)
    assert [name for name in named if not (ROOT / name.rstrip("/")).exists()] == []


@every_page
def test_every_file_shown_says_what_is_shown(page: Page) -> None:
    for block in page.blocks("yaml file", "json file"):
        assert (ROOT / block.file).read_text() == block.text, f"line {block.line}"


@pytest.mark.parametrize("door", ["envoy", "go", "node", "python"])
def test_a_failover_through_a_door_takes_at_most_ten_commands(door: str) -> None:
    """From nothing: cloning, `make run` and the activation of the README come before those of the page."""
    page = Page(ROOT / "docs" / "doors" / f"{door}.md")
    commands = 3
    for block in page.blocks("bash install", "bash serve", "bash start", "bash test", "python test"):
        programs = _HERE_DOCUMENT.sub("", block.text.replace("\\\n", " "))
        commands += 1 if block.tag == "python test" else len(re.split(r"&&|\n", programs.strip()))
        if block.tag == "python test" or "curl " in programs:
            break
    assert commands <= 10


_HERE_DOCUMENT = re.compile(r"(?<=<<')(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)


@every_page
def test_every_test_named_exists(page: Page) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.text)
    assert [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text()] == []


@every_page
def test_every_make_target_named_exists(page: Page) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z]+)", page.text, re.MULTILINE)
    assert [name for name in named if name not in targets] == []


SETTING_BLOCKS = {name.partition(".")[0] for name in REGISTRY if "." in name}


@every_page
def test_every_setting_named_exists(page: Page) -> None:
    known = {*REGISTRY, *server_fields(), *(f"{spec.rest}" for spec in REGISTRY.values())}
    known |= {re.sub(r"\.(oauth|api_key|local|default)\.", ".CLASS.", name) for name in REGISTRY}
    blocks = SETTING_BLOCKS | {name.partition(".")[0] for name in server_fields() if "." in name}
    named = re.findall(r"`([a-z_]+\.[a-zA-Z_.]+)`", page.text)
    assert [name for name in named if name.partition(".")[0] in blocks and name not in known] == []


_CLASSES = ("oauth", "api_key", "local")


def _shown_default(value: object) -> str:
    """A default as the pages write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return "-" if value is None else str(value)


def _defaults(name: str) -> str:
    if ".CLASS." in name:
        return " / ".join(_defaults(name.replace("CLASS", auth)) for auth in _CLASSES)
    return _shown_default(REGISTRY[name].default if name in REGISTRY else server_fields()[name].default)


@every_page
def test_every_default_stated_is_the_default(page: Page) -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", page.text, re.MULTILINE)
    stated = {name: value.strip() for name, value in rows if "." in name}
    assert stated == {name: _defaults(name) for name in stated}


def test_settings_that_the_readme_calls_without_effect_are_read_nowhere() -> None:
    found = re.search(r"have no effect yet: (.*?)\.$", Page(ROOT / "README.md").text, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w.]+)`", found[1]) if found else []
    assert [name for name in named if name.rpartition(".")[2] in _attributes_read()] == []


@cache
def _attributes_read() -> frozenset[str]:
    """Names of all attributes that the package reads, apart from the model of the settings itself."""
    sources = (path for path in (ROOT / "policy_service").rglob("*.py") if path.name != "server.py")
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))


@every_page
def test_yaml_that_is_only_shown_is_yaml(page: Page) -> None:
    for block in page.blocks("yaml shape"):
        assert list(yaml.safe_load_all(block.text))


def test_the_readme_names_every_strategy_that_is_refused() -> None:
    found = re.search(r"refused with UNKNOWN_STRATEGY: (.*?)\.", Page(ROOT / "README.md").text, re.DOTALL)
    assert found
    refused = {*ROUTE_STRATEGIES, "quota-share"} - set(IMPLEMENTED_STRATEGIES)
    assert set(re.findall(r"`([\w-]+)`", found[1])) == refused


def test_every_mechanism_has_its_page() -> None:
    assert [name for name in MECHANISM_PAGES if not (ROOT / "docs" / "concepts" / f"{name}.md").exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [Page(ROOT / "README.md")]
    while left:
        page = left.pop()
        if page.path in reached:
            continue
        reached.add(page.path)
        targets = ((page.path.parent / link.partition("#")[0]).resolve() for link in page.links())
        left += [Page(path) for path in targets if path.suffix == ".md" and path.exists()]
    assert [page.name for page in PAGES if page.path not in reached] == []


def test_pages_hold_no_path_of_a_machine() -> None:
    paths = re.compile(r"/(?:home|work|root|Users)/\w+")
    assert [(page.name, found[0]) for page in PAGES if (found := paths.findall(page.text))] == []


# --- the generated reference of rules -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("meanings", "ids"),
    [
        (rule_meanings.PIPELINE_MEANINGS, [row.id for row in classification.PIPELINE]),
        (rule_meanings.VERDICT_MEANINGS, [row.id for row in verdict.ROWS]),
        (
            rule_meanings.GUARD_MEANINGS,
            [name for name, *_ in chain[tuple[Any, ...]](guards.LOCAL_GUARDS, guards.BREAKER_TESTS)],
        ),
        (rule_meanings.LINTER_MEANINGS, list(rule_linter.LEVELS)),
    ],
    ids=["pipeline", "verdicts", "guards", "linter"],
)
def test_every_rule_has_a_sentence_and_every_sentence_a_rule(meanings: dict[str, str], ids: list[str]) -> None:
    assert set(meanings) == set(ids)
    assert all(meanings.values())


# --- names of the contract in Go and Node examples ------------------------------------------------------------------
def _messages() -> Iterator[Descriptor]:
    left = [message for file in FILES for message in file.message_types_by_name.values()]
    while left:
        message = left.pop()
        left += message.nested_types
        yield message


MESSAGES = {message.name: message for message in _messages()}
FIELDS = {name for message in MESSAGES.values() for name in message.fields_by_name}
ONEOFS = {name for message in MESSAGES.values() for name in message.oneofs_by_name}
ENUMS = {name: enum for file in FILES for name, enum in file.enum_types_by_name.items()}
METHODS = {method.name for file in FILES for service in file.services_by_name.values() for method in service.methods}
SERVICES = {name for file in FILES for name in file.services_by_name}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _lower_camel(name: str) -> str:
    camel = _camel(name)
    return camel[:1].lower() + camel[1:]


def _go_names() -> set[str]:
    """Names that the Go generator makes for the contract."""
    arms = (f"{m.name}_{_camel(field.name)}" for m in MESSAGES.values() for o in m.oneofs for field in o.fields)
    values = (f"{name}_{value}" for name, enum in ENUMS.items() for value in enum.values_by_name)
    clients = (f"New{name}Client" for name in SERVICES)
    return {*MESSAGES, *ENUMS, *arms, *values, *clients, *(f"{name}Client" for name in SERVICES)}


def test_go_examples_name_only_what_the_contract_has() -> None:
    members = {*map(_camel, FIELDS | ONEOFS)}
    for text in _texts("go"):
        assert set(re.findall(r"\bpolicyv1\.(\w+)", text)) <= _go_names()
        assert set(re.findall(r"\.Get(\w+)\(\)", text)) <= members
        assert set(re.findall(r"\b([A-Z]\w*):\s", text)) <= members
        assert set(re.findall(r"\bpolicy\.(\w+)\(", text)) <= METHODS


def test_node_examples_name_only_what_the_contract_has() -> None:
    words = {*map(_lower_camel, FIELDS | ONEOFS)}
    for text in _texts("javascript"):
        assert set(re.findall(r"\bpolicy\.(\w+)\(", text)) <= {name[0].lower() + name[1:] for name in METHODS}
        assert set(re.findall(r"[{,]\s*(\w+):", text)) - _NODE_OPTIONS <= words
        assert set(re.findall(r"\b(?:answer|result|decision)\.(\w+)", text)) <= words
        assert set(re.findall(r"\bv1\.(\w+)", text)) <= SERVICES


_NODE_OPTIONS = {"includeDirs", "longs", "enums"}


def test_examples_in_three_languages_are_in_the_readme() -> None:
    readme = Page(ROOT / "README.md")
    assert {"python test", "go", "javascript"} <= {block.tag for block in readme.blocks()}
    for block in readme.blocks("go", "javascript"):
        assert {"selecttarget", "reportoutcome"} <= set(_called(block.text))


def _called(text: str) -> Iterator[str]:
    yield from (name.lower() for name in re.findall(r"\.(\w+)\(", text))


def _texts(tag: str) -> Iterable[str]:
    found = [block.text for page in PAGES for block in page.blocks(tag)]
    assert found
    return found


def test_the_working_tree_of_the_examples_is_tracked() -> None:
    """A snippet that names an untracked file would work here and nowhere else."""
    tracked = subprocess.run(
        ["git", "ls-files", "docs", "README.md", "CHANGELOG.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode == 0:
        assert {page.name for page in PAGES} <= set(tracked.stdout.split())
