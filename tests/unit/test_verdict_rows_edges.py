"""The public verdict row by row: scope, reason, terminal state, fallback and wait (spec/classification.md)."""

from __future__ import annotations

import pytest

from policy_service.domain.verdict import ROWS, Row

TABLE = """
abort | none | client_error | - | stop no-wait
own-key-policy | none | rate_limit | - | stop
own-limiter | none | overloaded | - | -
own-timeout | none | network | - | -
local-fault | none | none | - | stop
spare-key | none | auth_error | - | -
request-resource | none | client_error | - | stop
free-tier-removed | model_lockout | quota_exhausted | - | -
input-bound | none | context_overflow | - | no-wait
network | provider_failure | network | - | -
by-ban | connection_terminal | auth_error | banned | -
by-quota-returns | connection_cooldown | quota_exhausted | - | -
burst-402 | connection_cooldown | rate_limit | - | -
by-wallet | connection_terminal | quota_exhausted | credits_exhausted | -
by-share-of-connection | connection_cooldown | quota_exhausted | - | -
by-share-of-model | model_lockout | quota_exhausted | - | -
content-policy | none | content_policy | - | stop no-wait
oversized-for-limit | none | context_overflow | - | no-wait
feature-not-included | none | model_access_denied | - | -
output-too-long | none | client_error | - | no-wait
context-overflow | none | context_overflow | - | no-wait
tool-use-failed | none | server_error | - | no-wait
region | provider_failure | region_blocked | - | -
client-unwelcome | connection_cooldown | client_blocked | - | -
client-blocked | provider_failure | client_blocked | - | -
retired-model | model_lockout | model_not_found | - | no-wait
model-load-failed | model_lockout | server_error | - | -
plan-without-access | connection_cooldown | model_access_denied | - | -
never-offered | model_lockout | model_access_denied | - | no-wait
model-entitlement | model_lockout | model_access_denied | - | -
missing-model | model_lockout | model_not_found | - | -
refused-model | model_lockout | model_access_denied | - | -
unserved-model | model_lockout | model_not_found | - | -
dead-credential | connection_terminal | auth_error | expired | -
by-dead-account | connection_terminal | auth_error | banned | -
weak-login | connection_cooldown | auth_error | - | -
overloaded-model | model_lockout | overloaded | - | -
overloaded-pool | model_lockout | overloaded | - | -
overloaded | provider_failure | overloaded | - | -
by-quota-of-model | model_lockout | quota_exhausted | - | -
by-quota | connection_cooldown | quota_exhausted | - | -
by-rate-limit | by_limit | rate_limit | - | -
project | connection_cooldown | model_access_denied | - | -
forbidden | connection_terminal | auth_error | banned | -
refused-key | connection_cooldown | auth_error | - | -
by-guard | none | client_error | - | stop
request-scoped | none | client_error | - | stop
bad-request | none | client_error | - | stop no-wait
server-error | provider_failure | server_error | - | -
other | connection_cooldown | client_error | - | -
"""
"""Name, scope, reason, terminal state; `stop`: no other account is tried; `no-wait`: a stated wait means nothing."""
SAID = [line for line in TABLE.splitlines() if line]


def _said(row: Row) -> str:
    marks = ("" if row.fallback else "stop ") + ("" if row.states_wait else "no-wait")
    return f"{row.id} | {row.scope} | {row.reason} | {row.terminal or '-'} | {marks.strip() or '-'}"


@pytest.mark.parametrize("number", range(len(SAID)))
def test_each_row_says_what_the_table_says_in_its_place(number: int) -> None:
    assert _said(ROWS[number]) == SAID[number]


def test_the_last_row_always_holds_and_there_are_no_more() -> None:
    assert len(ROWS) == len(SAID)
    assert Row("x", ROWS[-1].when, "none", "none") == Row("x", ROWS[-1].when, "none", "none", True, None, True)
