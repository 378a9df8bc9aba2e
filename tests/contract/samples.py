"""A row of any kind with no field at its default, derived from its annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, NewType, get_args, get_origin, get_type_hints

from policy_service.domain.state import Row
from policy_service.storage.codec import key_columns

_SCALARS: Mapping[Any, Any] = {int: 2**40, str: "text", float: 0.125, bool: False}


def sample_row(row_type: type[Row]) -> Row:
    """A row whose key parts are named after their columns."""
    parts = {name: f"part-{name}" for name in key_columns(row_type)}
    hints = get_type_hints(row_type)
    names = [field.name for field in dataclasses.fields(row_type)]  # type: ignore[arg-type]
    return row_type(**{name: parts.get(name) or _sample(hints[name]) for name in names})


def _sample(annotation: Any) -> Any:
    if isinstance(annotation, NewType):
        return _sample(annotation.__supertype__)
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if dataclasses.is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return annotation(**{field.name: _sample(hints[field.name]) for field in dataclasses.fields(annotation)})  # type: ignore[operator]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return list(annotation)[-1]
    return _generic(get_origin(annotation), get_args(annotation))


def _generic(origin: Any, args: tuple[Any, ...]) -> Any:
    if origin is tuple:
        return tuple(_sample(arg) for arg in args if arg is not Ellipsis)
    if origin is frozenset:
        return frozenset({_sample(args[0])})
    if origin is Mapping:
        return {"name": _sample(args[1])}
    (inner,) = (arg for arg in args if arg is not type(None))
    return _sample(inner)
