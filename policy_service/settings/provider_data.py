"""Provider entries of a catalogue: the strict model of one entry, its errors, and the built-in list.

`ProviderEntry` is the only place that knows how an entry looks in YAML; whoever loads a catalogue file reads
providers through it. Field meanings: spec/provider_catalogue.md section 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import resources
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from policy_service.domain.catalogue import ErrorRule, HeaderCondition, Provider, RestatementRule
from policy_service.domain.ids import AuthClass
from policy_service.domain.policy import effective_degradation  # noqa: F401  (fills the registry of settings)
from policy_service.domain.profiles import KindThreshold
from policy_service.domain.settings import REGISTRY

_DAY_MS = 86_400_000
_PROFILE_CLASSES = tuple(f".{auth}." for auth in AuthClass)


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


Name = Annotated[str, BeforeValidator(_lower), Field(min_length=1, max_length=128, pattern=r"^[^\s/]+$")]
Text = Annotated[str, Field(min_length=1, max_length=512)]
BaseUrl = Annotated[str, Field(max_length=512, pattern=r"^(https?://[A-Za-z0-9.\[\]:_-]+(/[A-Za-z0-9._~/-]*)?)?$")]
"""Scheme, host, port and path; no credential and no query."""
Status = Annotated[int, Field(ge=100, le=599)]
CodeMeaning = Literal[
    "credits",
    "banned",
    "credential",
    "period_quota",
    "rate_limit",
    "overloaded",
    "content_policy",
    "entitlement",
    "invalid_request",
]
CooldownMs = Annotated[int, Field(ge=0, le=30 * _DAY_MS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class QuotaMetricsEntry(_Strict):
    """Where a provider names the spent metric of a quota."""

    host: Text = Field(description="Text that marks an answer whose metric name is to be read.")


class RestatementEntry(_Strict):
    """Corrects a misleading status (spec/restatement_and_rules.md section 1)."""

    id: Text
    from_statuses: list[Status] = Field(min_length=1)
    to_status: Status
    text_markers: list[Text] = Field(min_length=1)
    exclude_markers: list[Text] = []
    default_retry_after_ms: CooldownMs | None = None

    def to_domain(self) -> RestatementRule:
        return RestatementRule(
            id=self.id,
            from_statuses=frozenset(self.from_statuses),
            to_status=self.to_status,
            text_markers=tuple(self.text_markers),
            exclude_markers=tuple(self.exclude_markers),
            default_retry_after_ms=self.default_retry_after_ms,
        )


class HeaderEntry(_Strict):
    """A condition on headers: any of `names` equals a value, or holds a `name=0` pair."""

    names: list[Name] = Field(min_length=1)
    equals: str | None = None
    zero_pair: bool = False

    @model_validator(mode="after")
    def _one_condition(self) -> HeaderEntry:
        if (self.equals is None) is not self.zero_pair:
            raise ValueError("state exactly one of equals and zero_pair")
        return self

    def to_domain(self) -> HeaderCondition:
        return HeaderCondition(tuple(self.names), self.equals, self.zero_pair)


class ErrorRuleEntry(_Strict):
    """A provider rule (spec/restatement_and_rules.md section 2)."""

    id: Text
    statuses: list[Status] = Field(min_length=1)
    body_any: list[Text] = []
    body_all: list[Text] = []
    codes: list[Text] = []
    headers: list[HeaderEntry] = []
    reason: Literal["quota_exhausted", "rate_limit_exceeded", "model_capacity", "server_error", "auth_error", "unknown"]
    scope: Literal["model", "connection", "provider"]
    cooldown_ms: CooldownMs | None = None
    cooldown_from_text: bool = False
    pre_check: bool = False

    @model_validator(mode="after")
    def _one_cooldown(self) -> ErrorRuleEntry:
        if self.cooldown_from_text and self.cooldown_ms is not None:
            raise ValueError("cooldown_ms and cooldown_from_text exclude each other; keep one")
        return self

    def to_domain(self) -> ErrorRule:
        return ErrorRule(
            id=self.id,
            statuses=frozenset(self.statuses),
            reason=self.reason,
            scope=self.scope,
            body_any=_lowered(self.body_any),
            body_all=_lowered(self.body_all),
            codes=_lowered(self.codes),
            headers=tuple(header.to_domain() for header in self.headers),
            cooldown_ms=self.cooldown_ms,
            cooldown_from_text=self.cooldown_from_text,
            pre_check=self.pre_check,
        )


class KindThresholdEntry(_Strict):
    """When failures of one kind open the breaker (spec/breaker.md section 6)."""

    threshold: int | None = Field(
        default=None, ge=1, le=10_000, description="Unset: 1 if immediate, else the breaker's."
    )
    immediate: bool = Field(default=False, description="The first one opens, where no threshold is given.")

    def to_domain(self) -> KindThreshold:
        return KindThreshold(self.threshold, self.immediate)


class ProviderEntry(_Strict):
    """One provider of a catalogue file (spec/provider_catalogue.md sections 1 and 5)."""

    id: Name = Field(description="Canonical id; `prefix*` and `*part*` are patterns.")
    aliases: list[Name] = []
    display_name: Annotated[
        str, Field(max_length=256, description="For people; owners of leases see it. Empty: the id.")
    ] = ""
    base_url: BaseUrl = Field(default="", description="Where Envoy finds the API; what stands before a client's path.")
    auth_class: Literal["oauth", "api_key", "local", "default"] = "default"
    no_auth: bool = False
    web_cookie: bool = False
    per_model_quota: bool = False
    passthrough: bool = False
    per_model_nonquota: bool = False
    quota_family: Literal["codex", "google_family", "tier"] | None = None
    family_pools: bool = False
    default_lock_scope: Literal["exact", "family", "bare"] | None = None
    model_lock_extra_statuses: list[Status] = []
    forbidden_is_model_scoped: bool = False
    full_text_rules: bool = False
    honors_rule_scope: bool = False
    egress_bucketed: bool = False
    shared_wallet_402: bool = False
    google_surface: bool = False
    cloud_code: bool = False
    route_error_texts: list[Text] = []
    request_rejected_texts: list[Text] = []
    extra_subscription_texts: list[Text] = []
    wallet_texts: list[Text] = []
    quota_metrics: QuotaMetricsEntry | None = None
    credits_text_is_terminal: bool = True
    ambiguous_401_soft: bool = False
    free_tier_billing: bool = False
    kind_hints_default: bool = True
    kind_thresholds: dict[Literal["rate_limit", "quota_exhausted", "transient"], KindThresholdEntry] = {}
    code_meanings: dict[str, CodeMeaning] = {}
    limits_per_model: bool = False
    hosts_models: bool = Field(
        default=False, description="Each model runs on machines of its own: overload is the model's, not the host's."
    )
    naive_times_offset: Annotated[str, Field(pattern=r"^([+-][0-2][0-9]:[0-5][0-9])?$")] = ""
    usage_wall: bool = False
    queue_wait_floor_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 0
    start_slot_ms: int = Field(
        default=0, ge=0, le=3_600_000, description="Gap between starts of paced calls to all its connections; 0: none."
    )
    queue_scope: Literal["", "quota_scope", "model_family", "model"] = ""
    account_limit_texts: list[Text] = []
    restatement: list[RestatementEntry] = []
    error_rules: list[ErrorRuleEntry] = []
    profile: dict[str, object] = {}

    @model_validator(mode="after")
    def _rule_ids_differ(self) -> ProviderEntry:
        ids = [rule.id for rule in self.error_rules] + [rule.id for rule in self.restatement]
        twice = sorted({rule for rule in ids if ids.count(rule) > 1})
        if twice:
            raise ValueError(f"rule id used twice: {', '.join(twice)}; give each rule its own id")
        return self

    @model_validator(mode="after")
    def _profile_names_exist(self) -> ProviderEntry:
        for name in flat_profile(self.profile):
            if name not in profile_names():
                raise ValueError(f"profile.{name} is no setting{_suggest(name, profile_names())}")
        return self

    def to_domain(self) -> Provider:
        """The entry as the value that logic reads; texts are lowered once here."""
        return Provider(
            **self.model_dump(exclude=_CONVERTED),
            aliases=tuple(self.aliases),
            auth_class=AuthClass(self.auth_class),
            model_lock_extra_statuses=frozenset(self.model_lock_extra_statuses),
            route_error_texts=_lowered(self.route_error_texts),
            request_rejected_texts=_lowered(self.request_rejected_texts),
            extra_subscription_texts=_lowered(self.extra_subscription_texts),
            wallet_texts=_lowered(self.wallet_texts),
            code_meanings={code.lower(): meaning for code, meaning in self.code_meanings.items()},
            account_limit_texts=_lowered(self.account_limit_texts),
            kind_thresholds={kind: each.to_domain() for kind, each in self.kind_thresholds.items()},
            quota_metrics_host=self.quota_metrics.host.lower() if self.quota_metrics else None,
            restatement=tuple(rule.to_domain() for rule in self.restatement),
            error_rules=tuple(rule.to_domain() for rule in self.error_rules),
            profile=flat_profile(self.profile),
        )


_CONVERTED = {
    "aliases",
    "auth_class",
    "model_lock_extra_statuses",
    "route_error_texts",
    "request_rejected_texts",
    "extra_subscription_texts",
    "wallet_texts",
    "quota_metrics",
    "kind_thresholds",
    "code_meanings",
    "account_limit_texts",
    "restatement",
    "error_rules",
    "profile",
}


class ProviderEntryError(ValueError):
    """An entry that cannot be used. `problems` are (path, remedy) pairs, all of them at once."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{path}: {remedy}" for path, remedy in self.problems))


def provider_from_entry(entry: Mapping[str, Any], path: str = "provider") -> Provider:
    """Read one provider entry.

    Args:
        entry: the mapping as parsed from YAML or JSON.
        path: where it stands, for messages, such as `providers[3]`.

    Raises:
        ProviderEntryError: unknown fields, wrong types, values out of range; names each path and the remedy.
    """
    if not isinstance(entry, Mapping):
        raise ProviderEntryError([(path, f"expected a mapping with an id, got {type(entry).__name__}")])
    try:
        return ProviderEntry.model_validate(dict(entry)).to_domain()
    except ValidationError as error:
        raise ProviderEntryError(problems_of(error, path)) from None


def problems_of(error: ValidationError, path: str, model: type[BaseModel] = ProviderEntry) -> list[tuple[str, str]]:
    """(path, remedy) of each problem that a strict model found; reusable for other models of the same file."""
    return [(_join(path, item["loc"]), _remedy(dict(item), model)) for item in error.errors(include_url=False)]


def flat_profile(profile: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """`{breaker: {failure_threshold: 4}}` as `{"breaker.failure_threshold": 4}`."""
    flat: dict[str, object] = {}
    for name, value in profile.items():
        if isinstance(value, Mapping):
            flat.update(flat_profile(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@lru_cache(maxsize=1)
def profile_names() -> frozenset[str]:
    """Names that a profile may override: settings, with or without the auth class."""
    short = {name.replace(part, ".") for name in REGISTRY for part in _PROFILE_CLASSES if part in name}
    return frozenset(REGISTRY) | short


@lru_cache(maxsize=1)
def builtin_providers() -> dict[str, Provider]:
    """The providers that ship with the service, by canonical id (patterns included)."""
    text = resources.files("policy_service").joinpath("catalogue/providers.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    found = (provider_from_entry(entry, f"providers[{index}]") for index, entry in enumerate(entries))
    return {provider.id: provider for provider in found}


def _lowered(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(text.lower() for text in texts)


def _join(path: str, location: Iterable[int | str]) -> str:
    return path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def _remedy(item: dict[str, Any], model: type[BaseModel]) -> str:
    if item["type"] == "extra_forbidden":
        name = str(item["loc"][-1])
        return f"unknown field{_suggest(name, _fields_at(model, item['loc'][:-1]))}"
    if item["type"] == "missing":
        return "required field is missing; add it"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message if item["type"] == "value_error" else f"{message} (got {item['input']!r:.60})"


def _fields_at(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    """Names allowed where an unknown field stands; falls back to the names of the outer model."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        inner = _model_in(field.annotation) if field else None
        model = inner or model
    return sorted(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in getattr(annotation, "__args__", ()) if (found := _model_in(arg))), None)


def _suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; allowed: {', '.join(names)}" if len(names) <= 40 else ""
