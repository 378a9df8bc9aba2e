"""Policy settings: one registry of names, defaults, ranges and meanings, and how a value is resolved.

Precedence (spec/README.md, Configuration): per-connection > stored > environment > provider catalogue
override > profile default. Environment numbers are taken as they stand; stored values are clamped when
read. Profiles of a mechanism (frozen numbers) are compiled from here by `policy`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ENV_PREFIX = "POLICY_"


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One setting: its type, default, range, unit and meaning. `default` None means unset."""

    name: str
    kind: str
    """`int`, `float`, `bool`, `choice`, `text`, `int_list`, `text_list`."""
    default: object
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    doc: str = ""
    spec: str = ""
    rest: str = ""
    """Name below /api/resilience, where the setting is patchable there."""
    environment_rule: str = "as_is"
    """How an environment number is read: `as_is` (finite, >= 0), `clamped` to the range too, or `positive_int`
    (anything but a positive integer is ignored)."""

    @property
    def environment(self) -> str:
        """`a.b.c` is POLICY_A_B_C."""
        return ENV_PREFIX + self.name.replace(".", "_").upper()


REGISTRY: dict[str, SettingSpec] = {}


def register(*specs: SettingSpec) -> None:
    """Add specs to the registry; a name twice is a programming error."""
    for spec in specs:
        if spec.name in REGISTRY:
            raise ValueError(f"setting registered twice: {spec.name}")
        REGISTRY[spec.name] = spec


ENV_ALIASES: dict[str, str] = {}
"""Setting name -> older environment name that is accepted too (spec/README.md, Configuration 5)."""

STORED_FALLBACKS: dict[str, str] = {}
"""Setting name -> setting whose stored value serves where the first has none (spec/affinity.md section 2)."""

_TRUE = frozenset({"true", "1", "on"})
_FALSE = frozenset({"false", "0", "off"})
_FLAG_TRUE = _TRUE | {"yes"}
_FLAG_FALSE = _FALSE | {"no"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class SettingSources:
    """Where values come from. `stored` by dotted name, `environment` by variable name."""

    stored: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def resolve(
        self,
        name: str,
        *,
        connection: Mapping[str, object] | None = None,
        catalogue: object | None = None,
        default: object | None = None,
    ) -> object | None:
        """Value of `name` for one connection; `default` overrides the registry's where given.

        Args:
            name: full dotted name; unknown names raise KeyError.
            connection: per-connection values by full name.
            catalogue: value that the provider's catalogue entry overrides, or None.
            default: profile default, or None for the registry's.
        """
        return self.resolve_with_source(name, connection=connection, catalogue=catalogue, default=default)[0]

    def resolve_with_source(
        self,
        name: str,
        *,
        connection: Mapping[str, object] | None = None,
        catalogue: object | None = None,
        default: object | None = None,
    ) -> tuple[object | None, str]:
        """As `resolve`, with the source: `connection`, `stored`, `environment`, `catalogue` or `default`."""
        spec = REGISTRY[name]
        if connection and (value := read_stored(spec, connection.get(name))) is not None:
            return value, "connection"
        if (value := self._stored(spec)) is not None:
            return value, "stored"
        if (value := self._environment(spec)) is not None:
            return value, "environment"
        if catalogue is not None and (value := read_stored(spec, catalogue)) is not None:
            return value, "catalogue"
        return (spec.default if default is None else default), "default"

    def any_source_on(self, name: str) -> bool:
        """True if the stored value or the environment switches `name` on (provider_cooldown.md section 1)."""
        spec = REGISTRY[name]
        return read_stored(spec, self.stored.get(name)) is True or self._environment(spec) is True

    def _stored(self, spec: SettingSpec) -> object | None:
        value = read_stored(spec, self.stored.get(spec.name))
        fallback = STORED_FALLBACKS.get(spec.name)
        return read_stored(spec, self.stored.get(fallback)) if value is None and fallback else value

    def _environment(self, spec: SettingSpec) -> object | None:
        for variable in (spec.environment, ENV_ALIASES.get(spec.name)):
            if variable and (raw := self.environment.get(variable)) is not None:
                value = read_environment(spec, raw)
                if value is not None:
                    return value
        return None


def read_stored(spec: SettingSpec, raw: object) -> object | None:
    """A stored value, clamped to the range; None where unusable (then the next source applies)."""
    if raw is None:
        return None
    if spec.kind == "bool":
        return raw if isinstance(raw, bool) else None
    if spec.kind in ("int", "float"):
        return _clamped(spec, raw)
    if spec.kind == "choice":
        return raw if raw in spec.choices else None
    if spec.kind == "text":
        return raw if isinstance(raw, str) else None
    return _read_list(spec, raw)


def read_environment(spec: SettingSpec, raw: str) -> object | None:
    """An environment value: finite numbers >= 0 as they stand, switches by word; None where unusable."""
    text = raw.strip()
    if spec.kind == "bool":
        lowered = text.lower()
        return True if lowered in _TRUE else False if lowered in _FALSE else None
    if spec.kind in ("int", "float"):
        return _environment_number(spec, text)
    if spec.kind == "choice":
        return text if text in spec.choices else None
    if spec.kind == "text":
        return text
    return _read_list(spec, [part.strip() for part in text.split(",") if part.strip()])


def read_flag(raw: str) -> bool | None:
    """A feature flag: a switch by word, `yes` and `no` included; None where unusable (the caller warns)."""
    word = raw.strip().lower()
    return True if word in _FLAG_TRUE else False if word in _FLAG_FALSE else None


def _environment_number(spec: SettingSpec, text: str) -> float | int | None:
    number = _number(text)
    if number is None or number < 0:
        return None
    if spec.environment_rule == "positive_int":
        return number if isinstance(number, int) and number > 0 else None
    return _clamped(spec, number) if spec.environment_rule == "clamped" else number


def _number(raw: object) -> float | int | None:
    """A finite number from a number or a plain decimal text; whole ones as int."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return None
    if isinstance(raw, int):
        return raw
    if isinstance(raw, str) and not _NUMBER.fullmatch(raw.strip()):
        return None
    number = float(raw)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else number


def _clamped(spec: SettingSpec, raw: object) -> float | int | None:
    number = _number(raw)
    if number is None:
        return None
    if spec.kind == "int":
        number = int(number)
    if spec.low is not None and number < spec.low:
        number = type(number)(spec.low)
    if spec.high is not None and number > spec.high:
        number = type(number)(spec.high)
    return number


def _read_list(spec: SettingSpec, raw: object) -> object | None:
    if not isinstance(raw, (list, tuple)):
        return None
    if spec.kind == "text_list":
        return tuple(str(item) for item in raw)
    numbers = [_clamped(SettingSpec(spec.name, "int", None), item) for item in raw]
    low, high = spec.low, spec.high
    kept = tuple(n for n in numbers if n is not None and (low is None or n >= low) and (high is None or n <= high))
    return kept or None
