"""Problems of configuration: what is wrong, what was given, what is allowed, what to do. Always all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `path` is dotted, `where` the place it was written (file and line, variable, flag)."""

    path: str
    problem: str
    given: str = ""
    allowed: str = ""
    remedy: str = ""
    where: str = ""

    def text(self) -> str:
        """One line for a person."""
        parts = [f"{self.path}: {self.problem}"]
        parts += [f"given: {self.given}"] if self.given else []
        parts += [f"allowed: {self.allowed}"] if self.allowed else []
        parts += [self.remedy] if self.remedy else []
        place = f"{self.where}: " if self.where else ""
        return place + "; ".join(parts)

    def as_dict(self) -> dict[str, str]:
        """The shape of `error.details` (spec/operator_surface.md section 1)."""
        fields = {"path": self.path, "problem": self.problem, "given": self.given, "allowed": self.allowed}
        extra = {"remedy": self.remedy, "where": self.where}
        return fields | {name: value for name, value in extra.items() if value}


class ConfigError(Exception):
    """Configuration that cannot be used; `problems` lists everything that is wrong with it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.text() for problem in self.problems))


def shown(value: object) -> str:
    """A value as given, short enough to print."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean x?`, or an empty text where nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def unknown(path: str, name: str, known: Sequence[str], *, what: str = "key", remedy: str = "") -> Problem:
    """A name that is not one of the known ones."""
    hint = remedy or did_you_mean(name, known) or f"remove it, or use one of the {what}s that are allowed here"
    listed = ", ".join(known) if len(known) <= 25 else f"{len(known)} names, see `policy-service config docs`"
    return Problem(path, f"unknown {what}", shown(name), listed, hint)


def join(location: Iterable[int | str]) -> str:
    """`("routes", 0, "name")` as `routes[0].name`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


Location = tuple[int | str, ...]
Locate = Callable[[Location], str]
"""Place where the value at a location was written."""


def from_validation(
    error: ValidationError,
    model: type[BaseModel],
    *,
    prefix: Location = (),
    locate: Locate = lambda _: "",
    remedies: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Every problem that a pydantic model found.

    Args:
        error: what the model raised.
        model: the model, for the names that are allowed.
        prefix: location of the validated value within the document.
        locate: finds file and line (or variable, flag) of a location.
        remedies: what to do about particular unknown keys, by name.
    """
    return [
        _one(dict(item), model, prefix, locate, remedies or {})
        for item in error.errors(include_url=False, include_context=True)
    ]


def _one(
    item: dict[str, Any],
    model: type[BaseModel],
    prefix: Location,
    locate: Locate,
    remedies: Mapping[str, str],
) -> Problem:
    inner = tuple(part for part in item["loc"] if part != "[key]")
    location = (*prefix, *inner)
    path, where = join(location) or "document", locate(location)
    if item["type"] == "extra_forbidden":
        name = str(inner[-1])
        known = names_at(model, inner[:-1])
        found = unknown(path, name, known, remedy=remedies.get(name, ""))
        return Problem(found.path, found.problem, found.given, found.allowed, found.remedy, where)
    if item["type"] == "missing":
        return Problem(path, "required key is missing", "", "", f"add {inner[-1]}", where or locate(location[:-1]))
    return _bad_value(item, path, where, _limits_at(model, inner))


_WHAT = {
    "greater_than_equal": ("out of range", "ge"),
    "less_than_equal": ("out of range", "le"),
    "greater_than": ("out of range", "gt"),
    "literal_error": ("not one of the allowed values", "expected"),
    "enum": ("not one of the allowed values", "expected"),
    "string_too_long": ("too long", "max_length"),
    "string_too_short": ("too short", "min_length"),
    "string_pattern_mismatch": ("not of the right form", "pattern"),
    "too_long": ("too many entries", "max_length"),
    "too_short": ("too few entries", "min_length"),
    "finite_number": ("not a finite number", ""),
}
_BOUNDS = {
    "ge": "at least {}",
    "le": "at most {}",
    "gt": "more than {}",
    "expected": "{}",
    "max_length": "length at most {}",
    "min_length": "length at least {}",
    "pattern": "text that matches {}",
    "": "a finite number",
}


def _bad_value(item: dict[str, Any], path: str, where: str, limits: str) -> Problem:
    given = "" if isinstance(item["input"], Mapping) else shown(item["input"])
    if item["type"] == "value_error":
        problem, _, remedy = str(item["msg"]).removeprefix("Value error, ").partition("; ")
        return Problem(path, problem, given, limits, remedy or "correct the value", where)
    if item["type"] in _WHAT:
        problem, bound = _WHAT[item["type"]]
        allowed = limits or _BOUNDS[bound].format(item.get("ctx", {}).get(bound, ""))
        return Problem(path, problem, given, allowed, "correct the value", where)
    allowed = _type_named(item["type"])
    return Problem(path, "wrong type", given, f"{allowed} {limits}".strip(), "correct the value", where)


def _limits_at(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """`1 .. 64` for a number whose model states both ends."""
    *outer, last = location or ("",)
    for part in outer:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_model_in(field.annotation) if field else None) or model
    found = model.model_fields.get(last) if isinstance(last, str) else None
    bounds = {
        key: getattr(part, key) for part in (found.metadata if found else ()) for key in _ENDS if hasattr(part, key)
    }
    return f"{bounds['ge']:.15g} .. {bounds['le']:.15g}" if len(bounds) == 2 else ""


_ENDS = ("ge", "le")


def _type_named(kind: str) -> str:
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}
    words |= {"list": "a list", "dict": "a mapping", "model": "a mapping", "tuple": "a list"}
    return next((word for name, word in words.items() if kind.startswith(name)), "")


def names_at(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    """Names that a model allows at a location."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_model_in(field.annotation) if field else None) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in getattr(annotation, "__args__", ()) if (found := _model_in(arg))), None)
