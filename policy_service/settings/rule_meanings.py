"""What each named rule says, in a sentence: for the generated reference. A test keeps the lists complete.

The ids are those of `domain.classification.PIPELINE`, `domain.verdict.ROWS`, `domain.guards` and `domain.rule_linter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _table(text: str) -> Mapping[str, str]:
    rows = (line.split("|", 1) for line in text.strip().splitlines())
    return {name.strip(): meaning.strip() for name, meaning in rows}


PIPELINE_MEANINGS: Final = _table("""
contract-violation        | The gateway's executor broke its own contract (code `executor_contract_violation`).
previous-response-binding | `previous_response_id` belongs to another account (409 with that text, or its code).
service-not-running       | A 503 whose header says that the other side only reports a connection cooldown of its own.
ban-text                  | Wording of a banned or deactivated account, or one of `terminal.custom_ban_signals`.
retired-model             | A 404 or 410 that says that the model is gone for good, or the code `model_decommissioned`.
endpoint-moved            | The endpoint has moved.
billing-suspension        | The account is suspended for billing.
quota-metric-day          | The provider's quota metric names a day, or the gateway knows the model's day as spent.
quota-metric-minute       | The provider's quota metric names requests or tokens of a minute.
quota-returns             | 402 or 403 that names a spent allowance together with the moment of its return.
credits-text              | Wording of an empty wallet.
credits-beyond            | An empty wallet in further wordings, or by a code of the provider's catalogue entry.
daily-text                | A spent daily quota whose reset can be told.
weekly-text               | A spent weekly quota; tested before the subscription wording.
subscription-text         | A spent subscription window, the provider's own wordings included.
session-text              | A spent session limit of a subscription.
quota-with-reset          | Wording of a spent quota together with a stated reset.
period-quota              | A spent quota of a period under 400 to 403, by wording, code or catalogue.
route-not-authorized      | A 403 that says that the account is not authorised for this route.
forbidden-rule            | A 403 of a provider whose rule scopes are honoured, matched by one of its rules.
pre-check-rule            | A 429 matched by a catalogue rule with `pre_check`.
credential-code           | A structured name says that the key or token is no good, under 400 or 403.
model-forbidden           | A 403 about a model that this account may not use.
cloudflare-no-retry       | A 403 of Cloudflare that repeating never heals.
forbidden-key             | Any other 403 for an API key, unless it speaks of a quota.
inner-request-error       | A 5xx that in truth refuses the length of this one request.
throttling-code           | A structured throttling code under a status that says something else.
overload-code             | A code that the provider's entry declares as overload.
invalid-request-code      | A code that the provider's entry declares as an invalid or a forbidden request.
configured                | A configured text, else the configured status (tables below), with a matching rule on top.
capacity-status           | 413 and 529.
quota-status-432          | 432.
provider-rule-400         | A 400 matched by a rule of the provider or the operator.
model-code                | 400 or 422 with a structured code about the model.
parameter                 | 400 or 422 about a parameter.
malformed                 | 400 or 422 about a malformed message or tool call.
overflow                  | 400 or 422 about the length of the input.
model-access              | 400 or 422 that says that the model is not served or not permitted.
nim-degraded              | 400 or 422 about a degraded function.
rate-words-400            | 400 or 422 that speaks of a rate limit.
bad-request               | Any other 400 or 422.
any-other                 | Everything else.
""")

VERDICT_MEANINGS: Final = _table("""
abort                  | The client or the gateway ended the call.
own-key-policy         | A limit that the gateway sets for its own callers.
own-limiter            | The gateway's own queue or limiter, or an open circuit of this service.
own-timeout            | A timeout that the gateway set itself.
local-fault            | A fault of the gateway's host, a plugin or a translation.
spare-key              | A 401 while the connection has another key to try.
request-resource       | A 404 about a file, item, response, upload or vector store of the caller.
free-tier-removed      | The model left the free tier.
input-bound            | The code says that the input is too long.
network                | No answer came, or it broke off.
by-ban                 | The pipeline found a banned account.
by-quota-returns       | The pipeline found an allowance that returns by itself.
burst-402              | A 402 that states when to come back.
by-wallet              | An empty wallet of the whole account.
by-share-of-connection | Payment is asked for; only this connection's share is spent.
by-share-of-model      | Payment is asked for; other models of the connection stay open.
content-policy         | The content was refused.
oversized-for-limit    | A single request above a limit per minute: waiting never helps.
feature-not-included   | The account lacks a feature that this request asks for.
output-too-long        | More output is asked for than the model gives.
context-overflow       | The input is too long for the model.
tool-use-failed        | The model produced a tool call that could not be read.
region                 | The region is not served.
client-unwelcome       | The provider serves the account, but not this kind of client or not from this address.
client-blocked         | The client program is blocked by its fingerprint, or a block page stands in front.
retired-model          | The model or endpoint is gone for good.
model-load-failed      | The server could not load the model.
plan-without-access    | The plan does not include this way of use.
never-offered          | An allowance of zero: the model is not part of this tier.
model-entitlement      | The model is there, this account may not use it.
degraded-model         | A 400 or 422 about a degraded function: the deployment of the model is unwell.
missing-model          | A 404 or 410 that speaks of a model.
refused-model          | A 403 that speaks of a model.
unserved-model         | Another status that says that the model is not served.
dead-credential        | A 401 or a code that says that the credential is dead.
by-dead-account        | The error type says that the account is deactivated.
weak-login             | Any other 401 without a spent allowance: not enough to end the credential.
overloaded-model       | Overload that blames one model.
overloaded-pool        | Overload under 429 where the provider counts per model.
overloaded             | Overload of the provider, or an empty 503 that states a wait.
by-quota-of-model      | A spent quota of a day or longer that is one model's own.
by-quota               | A spent quota of a day or longer.
by-rate-limit          | Any other limit; on the model or the connection, by what it is counted on.
project                | The owner has to switch an interface on.
forbidden              | A 403 that says that the account is forbidden.
refused-key            | Any other 403.
by-guard               | About this one request, by code, below 500.
request-scoped         | About this one request, by code, under a 5xx.
bad-request            | A 400, a 422 or a code of an invalid request: the request is wrong.
upstream-key           | A gateway in between tells, under a 5xx, that its upstream refuses the key.
server-error           | Any other 5xx, 408 and 424.
other                  | Everything else.
""")

GUARD_MEANINGS: Final = _table("""
abort                  | The caller left: 499, an abort by name or code; by text only where the upstream did not say it.
own-key-policy         | A limit of the gateway's own caller keys.
own-limiter            | The gateway's own queue.
own-circuit-open       | The answer is this service's own "circuit open".
own-timeout            | A timeout that the gateway set itself.
local-fault            | A fault of the gateway's host, a plugin's refusal, a failed translation.
spare-key              | A 401 while the connection declares `spare_keys`.
request-resource       | A 404 about a resource of the caller.
free-tier-removed      | The model left the free tier of a provider in free billing mode.
input-bound            | The input is too long, by code.
request-scoped         | About this one request, by code or type.
status                 | Not one of the counted statuses.
health-check           | Not made for a client.
overload               | 529, or the word "overloaded".
stream-readiness       | The gateway gave up waiting for a stream to begin.
skip-flag              | The pipeline rule says that the breaker skips it.
same-provider-next     | One request walks several accounts of a provider: only its last target counts.
own-queue-timeout      | The gateway's own queue timed out.
""")

LINTER_MEANINGS: Final = _table("""
too_many_rules    | More operator rules than allowed.
empty_match       | The rule would match every answer.
bad_status        | Not an HTTP status.
no_path           | No step consults rules for this status by itself.
text_not_visible  | The rule looks for a text that it is not shown.
scope_not_honored | The scope is a label only.
scope_provider    | The scope `provider` has no effect.
shadowed          | An earlier rule matches whenever this one does.
taken_earlier     | An earlier step of the pipeline decides every answer with this text.
generic_marker    | A restatement marker that is also a credits signal.
unknown_provider  | No catalogue entry has this id.
""")
