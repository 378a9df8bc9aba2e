"""The rule linter (spec/restatement_and_rules.md section 6): what is wrong with a rule before it is in force. Pure.

Findings of level `error` reject a change of rules, warnings only tell. Also the dry run of a set of rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from policy_service.domain import rules, signals
from policy_service.domain.catalogue import ErrorRule, OperatorRule, Provider, ProviderDirectory, RestatementRule

ERROR: Final = "error"
WARNING: Final = "warning"
LEVELS: Final[Mapping[str, str]] = {
    "too_many_rules": ERROR,
    "empty_match": ERROR,
    "bad_status": ERROR,
    "no_path": WARNING,
    "text_not_visible": WARNING,
    "scope_not_honored": WARNING,
    "scope_provider": WARNING,
    "shadowed": WARNING,
    "taken_earlier": WARNING,
    "generic_marker": ERROR,
    "unknown_provider": WARNING,
}
STATUSES_WITH_PATH: Final = frozenset({400, 401, 402, 403, 404, 406, 408, 429, 500, 502, 503, 504})
_TAKEN_ALWAYS = signals.BAN | signals.MOVED | signals.BILLING_SUSPENSION


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: code and level of section 6, the rule it is about, and what to do."""

    code: str
    provider: str
    rule_id: str
    remedy: str

    @property
    def level(self) -> str:
        """`error` rejects the change, `warning` does not."""
        return LEVELS[self.code]


def lint(providers: Mapping[str, Provider], operator_rules: Sequence[OperatorRule] = ()) -> list[Finding]:
    """All findings on a catalogue and its operator rules, in the order of the rules.

    Args:
        providers: the catalogue's providers by canonical id.
        operator_rules: the whole list that is to be in force.
    """
    directory = ProviderDirectory(providers)
    found = list(_lint_operator_rules(directory, operator_rules))
    for provider in providers.values():
        found += lint_provider(provider, [r for r in operator_rules if directory.canonical(r.provider) == provider.id])
    return found


def is_accepted(findings: Iterable[Finding]) -> bool:
    """False if any finding is an error."""
    return all(finding.level != ERROR for finding in findings)


def lint_provider(provider: Provider, operator_rules: Sequence[OperatorRule] = ()) -> list[Finding]:
    """Findings on the catalogue rules of one provider; `operator_rules` are those of the same provider."""
    found: list[Finding] = []
    for index, rule in enumerate(provider.error_rules):
        codes = (code for code, applies in _catalogue_checks(provider, index, rule, operator_rules) if applies)
        found += (Finding(code, provider.id, rule.id, REMEDIES[code]) for code in codes)
    for restatement in provider.restatement:
        found += _lint_markers(provider, restatement)
    return found


def _lint_operator_rules(directory: ProviderDirectory, listed: Sequence[OperatorRule]) -> Iterator[Finding]:
    if len(listed) > rules.OPERATOR_RULE_LIMIT:
        yield Finding("too_many_rules", "", "", REMEDIES["too_many_rules"])
        return
    for index, rule in enumerate(listed):
        name = rule.id or rules.operator_rule_id(_place(directory, listed[: index + 1], rule.provider))
        for code, applies in _operator_checks(directory, listed, index, rule):
            if applies:
                yield Finding(code, rule.provider, name, REMEDIES[code])


def _place(directory: ProviderDirectory, so_far: Sequence[OperatorRule], provider: str) -> int:
    wanted = directory.canonical(provider)
    return sum(directory.canonical(rule.provider) == wanted for rule in so_far)


def _operator_checks(
    directory: ProviderDirectory, listed: Sequence[OperatorRule], index: int, rule: OperatorRule
) -> Iterator[tuple[str, bool]]:
    is_status = 100 <= rule.status <= 599
    yield "empty_match", not rule.match.strip()
    yield "bad_status", not is_status
    yield "no_path", is_status and rule.status not in STATUSES_WITH_PATH
    yield "scope_provider", rule.scope == "provider"
    yield "shadowed", any(_operator_implies(directory, earlier, rule) for earlier in listed[:index])
    yield "taken_earlier", is_taken_earlier(rule.match.lower(), rule.status)
    yield "unknown_provider", not directory.is_known(rule.provider)


def _catalogue_checks(
    provider: Provider, index: int, rule: ErrorRule, operator_rules: Sequence[OperatorRule]
) -> Iterator[tuple[str, bool]]:
    wakes = bool(operator_rules) or rule.pre_check
    needs_text = bool(rule.body_any or rule.body_all) and not rule.codes
    yield "bad_status", any(not 100 <= status <= 599 for status in rule.statuses)
    yield "no_path", not rule.statuses <= STATUSES_WITH_PATH
    yield "text_not_visible", needs_text and not (wakes or provider.full_text_rules)
    yield "scope_not_honored", rule.scope in ("connection", "model") and not (wakes or provider.honors_rule_scope)
    yield "scope_provider", rule.scope == "provider"
    yield "shadowed", _is_shadowed(provider, index, rule, operator_rules)
    texts = (*rule.body_any, *rule.body_all)
    yield "taken_earlier", any(is_taken_earlier(text, status) for text in texts for status in rule.statuses)


def is_taken_earlier(match: str, status: int) -> bool:
    """True if an earlier step of the pipeline decides every text that contains `match` (lower case)."""
    if _TAKEN_ALWAYS.found_in(match) or signals.is_retired(match):
        return True
    if signals.is_weekly(match) or signals.is_session_limit(match):
        return True
    return status != 429 and signals.CREDITS.found_in(match)


def _operator_implies(directory: ProviderDirectory, earlier: OperatorRule, later: OperatorRule) -> bool:
    same = directory.canonical(earlier.provider) == directory.canonical(later.provider)
    return same and earlier.status == later.status and earlier.match.lower() in later.match.lower()


def _is_shadowed(provider: Provider, index: int, rule: ErrorRule, operator_rules: Sequence[OperatorRule]) -> bool:
    if any(_catalogue_implies(earlier, rule) for earlier in provider.error_rules[:index]):
        return True
    return any(
        rule.statuses == {earlier.status} and _always_contains(rule, earlier.match.lower())
        for earlier in operator_rules
    )


def _catalogue_implies(earlier: ErrorRule, later: ErrorRule) -> bool:
    """True if `earlier` matches whenever `later` does, by what can be read off the two rules."""
    if earlier.cooldown_from_text or not later.statuses <= earlier.statuses:
        return False
    if earlier.headers and earlier.headers != later.headers:
        return False
    if not (earlier.body_any or earlier.body_all or earlier.codes):
        return True
    if later.codes:
        return set(later.codes) <= set(earlier.codes)
    return not earlier.codes and _texts_imply(earlier, later)


def _texts_imply(earlier: ErrorRule, later: ErrorRule) -> bool:
    any_holds = not earlier.body_any or any(_always_contains(later, text) for text in earlier.body_any)
    return any_holds and all(_always_contains(later, text) for text in earlier.body_all)


def _always_contains(rule: ErrorRule, text: str) -> bool:
    """True if every text that satisfies the rule contains `text`."""
    if any(text in part for part in rule.body_all):
        return True
    return bool(rule.body_any) and not rule.codes and all(text in part for part in rule.body_any)


def _lint_markers(provider: Provider, rule: RestatementRule) -> list[Finding]:
    generic = any(is_generic_marker(marker.lower()) for marker in rule.text_markers)
    return [Finding("generic_marker", provider.id, rule.id, REMEDIES["generic_marker"])] if generic else []


def is_generic_marker(marker: str) -> bool:
    """True if a restatement marker is a credits signal: it would turn an empty wallet into a short wait."""
    return signals.CREDITS.found_in(marker) or any(marker in phrase for phrase in signals.CREDITS.phrases)


REMEDIES: Final[Mapping[str, str]] = {
    "too_many_rules": f"keep at most {rules.OPERATOR_RULE_LIMIT} operator rules; merge rules that share a text",
    "empty_match": "give a text that the answer contains; an empty match would take every answer",
    "bad_status": "use an HTTP status from 100 to 599",
    "no_path": "no step consults rules for this status by itself; it acts only where the text hits a configured text",
    "text_not_visible": "set full_text_rules or declare an operator rule for it; until then the text is not seen",
    "scope_not_honored": "set honors_rule_scope or declare an operator rule for it; until then the scope is a label",
    "scope_provider": "scope provider has no effect; use connection or model",
    "shadowed": "an earlier rule of the provider matches whenever this one does; move this rule up or drop it",
    "taken_earlier": "an earlier step decides answers with this text; choose a text of its own",
    "generic_marker": "choose a marker of this provider's own; this one also means an empty wallet elsewhere",
    "unknown_provider": "no catalogue entry has this id; check the spelling or add the provider",
}
