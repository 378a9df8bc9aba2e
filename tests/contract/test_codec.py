"""Rows survive storage: every kind, every value, and what other releases wrote."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import policy_service.domain
from policy_service.domain import state
from policy_service.domain.facts import Fact
from policy_service.domain.ids import ProviderId
from policy_service.storage.codec import BIGINT_MAX, ColumnType, clean_text, codec_of, key_columns, row_codec
from policy_service.storage.postgres.tables import STATE_TABLES, STORE_COLUMNS
from policy_service.storage.rows import STATE_ROWS, decode_row, encode_row

TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(-BIGINT_MAX, BIGINT_MAX)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    id: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A row with every shape of field that rows may have."""

    KIND: ClassVar[str] = "sample"
    provider: ProviderId
    connection: str = ""
    colour: Colour = Colour.RED
    ratio: float = 0.5
    is_on: bool = True
    inners: tuple[Inner, ...] = ()
    pairs: tuple[tuple[int, str], ...] = ()
    inner: Inner | None = None
    names: frozenset[str] = frozenset()
    colours: tuple[Colour, ...] = ()
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


INNERS = st.builds(Inner, TEXTS, st.none() | NUMBERS)
SAMPLES = st.builds(
    Sample,
    TEXTS.map(ProviderId),
    TEXTS,
    st.sampled_from(Colour),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(INNERS, max_size=3).map(tuple),
    st.lists(st.tuples(NUMBERS, TEXTS), max_size=3).map(tuple),
    st.none() | INNERS,
    st.frozensets(TEXTS, max_size=3),
    st.lists(st.sampled_from(Colour), max_size=3).map(tuple),
    st.dictionaries(TEXTS, TEXTS, max_size=3),
)


@given(SAMPLES)
def test_a_row_comes_back_from_json_as_it_was(sample: Sample) -> None:
    codec = row_codec(Sample)
    assert codec.decode(json.loads(json.dumps(codec.encode(sample), allow_nan=False))) == sample


@pytest.mark.parametrize("row_type", STATE_ROWS, ids=lambda row_type: row_type.KIND)
def test_every_registered_kind_comes_back_with_its_key_columns(row_type: type[state.Row]) -> None:
    parts = [f"part{number}" for number in range(len(key_columns(row_type)))]
    row = row_type.default((row_type.KIND, *parts))
    assert decode_row(row_type.KIND, encode_row(row)) == row
    assert [getattr(row, name) for name in key_columns(row_type)] == parts
    assert row.key == (row_type.KIND, *parts)


def test_every_kind_of_row_in_the_domain_is_registered() -> None:
    kinds: set[object] = set()
    for module in pkgutil.walk_packages(policy_service.domain.__path__, "policy_service.domain."):
        members: list[Any] = [*vars(importlib.import_module(module.name)).values()]
        kinds |= {vars(found).get("KIND") for found in members if isinstance(found, type)}
    assert {kind for kind in kinds if isinstance(kind, str)} == set(STATE_TABLES)


@pytest.mark.parametrize("row_type", STATE_ROWS, ids=lambda row_type: row_type.KIND)
def test_no_field_of_a_row_is_named_like_a_column_of_the_store(row_type: type[state.Row]) -> None:
    names = {field.name for field in dataclasses.fields(row_type)}  # type: ignore[arg-type]
    assert names.isdisjoint(STORE_COLUMNS)


@pytest.mark.parametrize(
    ("field", "stored", "read"),
    [
        ("colour", "green", Colour.RED),
        ("colour", None, Colour.RED),
        ("ratio", "a lot", 0.5),
        ("is_on", 1, True),
        ("inners", [{"at": 5}], ()),
        ("inner", {"id": "a", "shape": "round"}, Inner("a")),
        ("pairs", [[1]], ()),
        ("headers", {"a": 1}, {}),
        ("headers", 7, {}),
        ("colours", ["red", "green"], ()),
    ],
)
def test_a_value_that_this_release_does_not_know_reads_as_the_default(field: str, stored: Any, read: Any) -> None:
    codec = row_codec(Sample)
    known = codec.encode(Sample(ProviderId("openai")))
    assert getattr(codec.decode(known | {field: stored}), field) == read


def test_columns_of_another_release_are_ignored_or_filled_with_defaults() -> None:
    assert row_codec(Sample).decode({"provider": "openai", "shape": "round"}) == Sample(ProviderId("openai"))


def test_a_row_without_its_key_is_refused() -> None:
    with pytest.raises(KeyError):
        row_codec(Sample).decode({"connection": "a"})


def test_numbers_saturate_and_infinities_pass_as_text() -> None:
    assert codec_of(int).encode(2**80) == BIGINT_MAX
    assert codec_of(float).encode(math.inf) == "inf"
    assert codec_of(float).decode("inf") == math.inf


@given(st.text())
def test_cleaned_text_is_storable_and_cleaning_twice_changes_nothing(text: str) -> None:
    cleaned = clean_text(text)
    assert "\x00" not in cleaned
    assert clean_text(cleaned) == cleaned == cleaned.encode().decode()


def test_shapes_without_a_column_are_refused() -> None:
    for annotation in (object, list[int], dict[str, int]):
        with pytest.raises(TypeError):
            codec_of(annotation)


def test_annotations_have_their_column_types() -> None:
    expected = {
        int: ColumnType.BIGINT,
        ProviderId: ColumnType.TEXT,
        Colour: ColumnType.TEXT,
        bool: ColumnType.BOOLEAN,
        float: ColumnType.DOUBLE,
        Inner: ColumnType.JSONB,
    }
    assert {annotation: codec_of(annotation).type for annotation in expected} == expected
    assert codec_of(int | None).is_nullable
    assert row_codec(Fact).fields[0].name == "id"
