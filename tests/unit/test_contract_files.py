"""The contract as files: generated code is current, every comment is there, enums and texts agree with the rest."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from policy_service.application import errors
from policy_service.application.messages import (
    ActionKind,
    Affinity,
    EndKind,
    PermitKind,
    PermitUse,
)
from policy_service.domain.ids import AuthClass
from policy_service.domain.outcome import CallKind, Origin
from policy_service.generated.policy.v1 import (
    admin_pb2,
    lease_pb2,
    permit_pb2,
    policy_pb2,
    reasons_pb2,
    stream_pb2,
    types_pb2,
)
from policy_service.transport.grpc import wire_enums
from policy_service.transport.grpc.errors import CODES
from policy_service.transport.grpc.wire_enums import WireEnum

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
FILES = [each.DESCRIPTOR for each in (policy_pb2, types_pb2, lease_pb2, permit_pb2, stream_pb2, reasons_pb2, admin_pb2)]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_code_is_what_the_contract_says() -> None:
    module = generator()
    drifted = {each.path: module.drift(each.path, module.tree(each)) for each in module.DESTINATIONS}
    assert not any(drifted.values()), drifted
    assert len(drifted) == 3


def test_drift_is_seen(tmp_path: Path) -> None:
    module = generator()
    module.write(tmp_path, {"a/__init__.py": "", "a/b.py": "x = 1\n"})
    assert module.drift(tmp_path, {"a/__init__.py": "", "a/b.py": "x = 1\n"}) == []
    assert module.drift(tmp_path, {"a/__init__.py": "", "a/b.py": "x = 2\n", "a/c.py": ""}) == ["a/b.py", "a/c.py"]


def test_the_lock_file_names_no_download_address() -> None:
    lock = json.loads((PROTO / "package-lock.json").read_text())
    assert [name for name, each in lock["packages"].items() if "resolved" in each] == []


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    yield from file.message_types_by_name.values()


def fields() -> Iterator[FieldDescriptor]:
    for file in FILES:
        for message in messages(file):
            yield from message.fields


_KEYWORDS = "message|enum|service|rpc|oneof|optional|repeated|map<|string|bool|bytes|double|int32|int64"
_COMMENTED = re.compile(rf"^\s*(?:{_KEYWORDS}|[A-Z]\w+ |[A-Z_]+ =)")


@pytest.mark.parametrize("path", sorted(PROTO.glob("policy/**/*.proto")), ids=lambda path: path.name)
def test_every_message_field_value_and_call_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [line for before, line in pairwise(lines) if _is_bare(before, line)]
    assert bare == []


def _is_bare(before: str, line: str) -> bool:
    is_element = _COMMENTED.match(line) and not line.lstrip().startswith(("option ", "import ", "//"))
    return bool(is_element) and not before.lstrip().startswith("//")


_SPAN = re.compile(r"(ttl|timeout|delay|latency|remaining|retry_after|_age)$")


def test_times_say_their_unit() -> None:
    instants = [f.full_name for f in fields() if re.search(r"_at(_|$)", f.name) and not f.name.endswith("at_unix_ms")]
    spans = [f.full_name for f in fields() if _SPAN.search(f.name) and f.type != FieldDescriptor.TYPE_BOOL]
    assert instants == []
    assert spans == []


def test_every_reason_enum_has_a_text_beside_it() -> None:
    texted = {"Mechanism", "ExclusionReason", "WaitReason", "TerminalReason", "Recovery", "OutcomeReason", "BlameScope"}
    alone = [
        field.full_name
        for file in FILES
        for message in messages(file)
        for field in message.fields
        if field.enum_type is not None
        and field.enum_type.name in texted
        and f"{field.name}_text" not in message.fields_by_name
    ]
    assert alone == []


def test_no_message_says_pool_or_ticket_where_the_vocabulary_says_route_or_token() -> None:
    assert [f.full_name for f in fields() if re.search(r"decision_ticket|pool_name", f.name)] == []


# --- texts ------------------------------------------------------------------------------------------------------


def test_every_reason_of_an_error_class_is_documented_in_the_contract() -> None:
    documented = {name.removeprefix("ERROR_REASON_") for name in reasons_pb2.ErrorReason.keys()}  # noqa: SIM118
    classes = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.PolicyError)]
    assert {each.default_reason for each in classes} <= documented


@pytest.mark.parametrize("kind", list(errors.ErrorKind))
def test_every_kind_of_error_has_a_status_code(kind: errors.ErrorKind) -> None:
    assert kind in CODES


@pytest.mark.parametrize(
    ("enum", "texts"),
    [
        (wire_enums.AUTH_CLASS, [c for c in AuthClass if c is not AuthClass.NONE]),
        (wire_enums.CALL_KIND, list(CallKind)),
        (wire_enums.PERMIT_KIND, list(PermitKind)),
        (wire_enums.ORIGIN, [o for o in Origin if o]),
        (wire_enums.ACTION, list(ActionKind)),
        (wire_enums.AFFINITY, [a for a in Affinity if a is not Affinity.NONE]),
        (wire_enums.PERMIT_USE, [u for u in PermitUse if u is not PermitUse.NOT_NEEDED]),
        (wire_enums.RECOVERY, ["wait", "switch-combo", "try-auto", "retry"]),
        (wire_enums.EXCLUSION, ["circuit_open", "probe_in_flight", "lease_hidden", "context_overflow"]),
        (wire_enums.BLAME, ["none", "request", "model", "connection", "provider", "local"]),
        (wire_enums.IGNORED, ["duplicate", "stale_generation", "void_permit", "stale_success", "suppressed"]),
    ],
)
def test_every_text_of_the_service_has_its_number(enum: WireEnum[int], texts: list[str]) -> None:
    assert [text for text in texts if enum.number(text) == 0] == []


def test_texts_and_numbers_come_back() -> None:
    enum = wire_enums.EXCLUSION
    assert all(enum.number(enum.text(number)) == number for number in enum.texts)


def test_a_text_of_a_newer_service_is_number_zero() -> None:
    assert wire_enums.EXCLUSION.number("not_yet_invented") == 0
    assert wire_enums.EXCLUSION.text(9_999) == ""


def test_the_arms_of_an_outcome_are_the_kinds_of_end() -> None:
    arms = policy_pb2.ReportOutcomeRequest.DESCRIPTOR.oneofs_by_name["outcome"].fields
    assert [arm.name for arm in arms] == list(EndKind)
