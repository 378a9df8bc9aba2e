"""The fields of `ServerConfig` as rows: dotted name, variable, type, default, range, unit, meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args, get_origin
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from policy_service.domain.settings import ENV_PREFIX
from policy_service.settings.flags import FLAGS
from policy_service.settings.server import ServerConfig


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the process configuration."""

    name: str
    kind: str
    default: object
    allowed: str
    unit: str
    doc: str
    secret: bool
    is_list: bool

    @property
    def environment(self) -> str:
        """`store.select_ms` is POLICY_STORE_SELECT_MS."""
        return ENV_PREFIX + self.name.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The flag of its own, or an empty text."""
        return FLAGS[self.name].text if self.name in FLAGS else ""


@lru_cache(maxsize=1)
def server_fields() -> Mapping[str, FieldRow]:
    """Every field of `ServerConfig` by dotted name, in order."""
    return {row.name: row for row in _rows(ServerConfig, "")}


def _rows(model: type[BaseModel], prefix: str) -> Iterator[FieldRow]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _rows(inner, f"{prefix}{name}.")
        else:
            yield _row(f"{prefix}{name}", field)


def _row(name: str, field: FieldInfo) -> FieldRow:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = None if field.default is PydanticUndefined else field.default
    secret = "SecretStr" in repr(field.annotation)
    is_list = get_origin(field.annotation) is tuple
    kind = _kind(field.annotation, is_list)
    return FieldRow(
        name, kind, default, _allowed(field), str(extra.get("unit", "")), field.description or "", secret, is_list
    )


def _kind(annotation: Any, is_list: bool) -> str:
    if is_list:
        return "list of text"
    if annotation in (int, bool):
        return {int: "whole number", bool: "true or false"}[annotation]
    return "text"


def _allowed(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(choices)
    bounds = {name: getattr(part, name) for part in field.metadata for name in ("ge", "le") if hasattr(part, name)}
    return f"{bounds['ge']} .. {bounds['le']}" if len(bounds) == 2 else ""


def value_of(config: ServerConfig, name: str) -> Any:
    """Value of a dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def shown_value(config: ServerConfig, row: FieldRow) -> object:
    """Value for people: secrets hidden, lists as lists."""
    value = value_of(config, row.name)
    if isinstance(value, SecretStr):
        return hidden_url(value.get_secret_value())
    if row.secret:
        return ["********"] * len(value or ())
    return list(value) if isinstance(value, tuple) else value


def hidden_url(url: str) -> str:
    """A database address without its password (nor any in its query)."""
    parts = urlsplit(url)
    account, at, place = parts.netloc.rpartition("@")
    user, colon, _ = account.partition(":")
    query = urlencode(
        [(k, "********" if k.lower() in ("password", "sslpassword") else v) for k, v in parse_qsl(parts.query)]
    )
    netloc = f"{user}{':********' if colon else ''}{at}{place}"
    return urlunsplit((parts.scheme, netloc, parts.path, query.replace("%2A", "*"), ""))
