"""Codec between frozen row dataclasses and flat JSON objects, derived from the dataclass alone.

One JSON object per row, one column per field: the same object feeds the typed table, the change feed and the
full load. Reading is lenient, because replicas of two releases share a database while one is rolled out:
an unknown column is ignored; a missing one, or a value outside its list, reads as the field's default.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from functools import cache
from typing import Any, Generic, NamedTuple, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from policy_service.domain.state import Key, Row

R = TypeVar("R")

BIGINT_MAX = 2**63 - 1


class ColumnType(StrEnum):
    """Database type of one field."""

    BIGINT = "BIGINT"
    TEXT = "TEXT"
    BOOLEAN = "BOOLEAN"
    DOUBLE = "DOUBLE PRECISION"
    JSONB = "JSONB"


class Codec(NamedTuple):
    """How the values of one annotation are stored. `decode` raises ValueError, TypeError or KeyError."""

    type: ColumnType
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    is_nullable: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class FieldCodec:
    """One field of a row."""

    name: str
    codec: Codec
    default: Callable[[], Any] | None
    """None: the field is required and must be present and readable."""

    def read(self, stored: Mapping[str, Any]) -> Any:
        """Stored value, or the default where it is absent or not understood."""
        try:
            return self.codec.decode(stored[self.name])
        except (ValueError, TypeError, KeyError):
            if self.default is None:
                raise
            return self.default()


@dataclasses.dataclass(frozen=True, slots=True)
class RowCodec(Generic[R]):
    """Codec of one dataclass."""

    type: type[R]
    fields: tuple[FieldCodec, ...]

    def encode(self, row: R) -> dict[str, Any]:
        """JSON object with every field."""
        return {field.name: field.codec.encode(getattr(row, field.name)) for field in self.fields}

    def decode(self, stored: Mapping[str, Any]) -> R:
        """The row; raises ValueError, TypeError or KeyError only where a required field is unreadable."""
        return self.type(**{field.name: field.read(stored) for field in self.fields})


@cache
def row_codec(row_type: type[R]) -> RowCodec[R]:
    """Codec of a dataclass, derived from its fields."""
    hints = get_type_hints(row_type)
    described = dataclasses.fields(row_type)  # type: ignore[arg-type]
    return RowCodec(row_type, tuple(FieldCodec(f.name, codec_of(hints[f.name]), _default(f)) for f in described))


def key_columns(row_type: type[Row]) -> tuple[str, ...]:
    """Names of the fields that form the key, in key order: a row whose texts are their own names tells them."""
    hints = get_type_hints(row_type)
    texts = {f.name: f.name for f in dataclasses.fields(row_type) if hints[f.name] is str}  # type: ignore[arg-type]
    key: Key = row_type(**texts).key
    return key[1:]


def clean_text(text: str) -> str:
    """Text as the database can hold it: no NUL, no lone surrogate (one poisoned event must not block its batch)."""
    if text.isascii() and "\x00" not in text:
        return text
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def _default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default is not dataclasses.MISSING:
        return lambda: field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory


def codec_of(annotation: Any) -> Codec:
    """Codec of one annotation; raises TypeError where rows may not use it."""
    if isinstance(annotation, NewType):
        return codec_of(annotation.__supertype__)
    scalar = _SCALARS.get(annotation)
    if scalar is not None:
        return scalar
    if isinstance(annotation, type) and not get_args(annotation):
        return _class_codec(annotation)
    return _generic_codec(get_origin(annotation), get_args(annotation))


def _class_codec(annotation: type) -> Codec:
    if issubclass(annotation, Enum):
        return Codec(ColumnType.TEXT, lambda member: member.value, annotation)
    if dataclasses.is_dataclass(annotation):
        nested = row_codec(annotation)
        return Codec(ColumnType.JSONB, nested.encode, nested.decode)
    raise TypeError(f"rows cannot hold {annotation!r}")


def _generic_codec(origin: Any, args: tuple[Any, ...]) -> Codec:
    if origin in (types.UnionType, Union):
        return _optional(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence(codec_of(args[0]), tuple)
    if origin is tuple:
        return _fixed([codec_of(arg) for arg in args])
    if origin is frozenset:
        return _sequence(codec_of(args[0]), frozenset)
    if origin is Mapping and args[0] is str:
        return _mapping(codec_of(args[1]))
    raise TypeError(f"rows cannot hold {origin!r}")


def _optional(args: tuple[Any, ...]) -> Codec:
    (inner,) = (codec_of(arg) for arg in args if arg is not type(None))
    return Codec(inner.type, _skip_none(inner.encode), _skip_none(inner.decode), is_nullable=True)


def _skip_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _sequence(item: Codec, collect: Callable[[Any], Any]) -> Codec:
    def encode(values: Any) -> list[Any]:
        encoded = [item.encode(value) for value in values]
        return sorted(encoded) if collect is frozenset else encoded

    return Codec(ColumnType.JSONB, encode, lambda stored: collect(item.decode(value) for value in stored))


def _fixed(items: list[Codec]) -> Codec:
    return Codec(
        ColumnType.JSONB,
        lambda values: [item.encode(value) for item, value in zip(items, values, strict=True)],
        lambda stored: tuple(item.decode(value) for item, value in zip(items, stored, strict=True)),
    )


def _mapping(value: Codec) -> Codec:
    return Codec(
        ColumnType.JSONB,
        lambda values: {clean_text(name): value.encode(each) for name, each in values.items()},
        lambda stored: {name: value.decode(each) for name, each in dict(stored).items()},
    )


def _encode_int(value: int) -> int:
    """Within BIGINT; a caller's absurd number saturates instead of failing the whole batch."""
    return max(-BIGINT_MAX, min(BIGINT_MAX, int(value)))


def _encode_float(value: float) -> float | str:
    """JSON has no NaN or infinities; Postgres reads them from text."""
    return value if math.isfinite(value) else str(value)


def _exactly(*accepted: type) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        if isinstance(value, accepted) and (bool in accepted or not isinstance(value, bool)):
            return value
        raise TypeError(f"{value!r} is not {accepted[0].__name__}")

    return decode


_SCALARS: Mapping[Any, Codec] = {
    int: Codec(ColumnType.BIGINT, _encode_int, _exactly(int)),
    str: Codec(ColumnType.TEXT, clean_text, _exactly(str)),
    bool: Codec(ColumnType.BOOLEAN, bool, _exactly(bool)),
    float: Codec(ColumnType.DOUBLE, _encode_float, float),
}
