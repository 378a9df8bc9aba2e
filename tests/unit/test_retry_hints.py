"""Reading of retry hints (spec/retry_hints.md): places, order, grammar, caps, switches."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from policy_service.domain.ids import HintSource
from policy_service.domain.profiles import HintProfile
from policy_service.domain.retry_hints import parse_resets_in, read_header_hint, read_hint, stated_wait_ms

NOW = int(datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC).timestamp() * 1_000)
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
CAP = 30 * DAY


def from_text(text: str, *, profile: HintProfile | None = None) -> int | None:
    hint = read_hint({}, None, text, NOW, profile or HintProfile())
    return hint.wait_ms if hint else None


def from_headers(headers: dict[str, str], *, extended: bool = True) -> int | None:
    hint = read_header_hint(headers, NOW, HintProfile(extended_reset_headers=extended))
    return hint.wait_ms if hint else None


def from_body(body: object, *, extended: bool = True) -> int | None:
    hint = read_hint({}, body, "", NOW, HintProfile(extended_texts=extended))
    return hint.wait_ms if hint else None


def test_a_hint_tells_wait_source_and_the_instant_it_ends() -> None:
    hint = read_hint({"retry-after": "2"}, None, "", NOW, HintProfile())
    assert hint is not None
    assert (hint.wait_ms, hint.source, hint.reset_at) == (2_000, HintSource.HEADER, NOW + 2_000)


def test_headers_beat_the_body_and_the_body_beats_the_text() -> None:
    body = {"error": {"retry_after_ms": 7}}
    with_all = read_hint({"retry-after": "2"}, body, "please retry in 9s", NOW, HintProfile())
    without_headers = read_hint({}, body, "please retry in 9s", NOW, HintProfile())
    assert with_all is not None
    assert without_headers is not None
    assert (with_all.wait_ms, without_headers.wait_ms) == (2_000, 7)


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("120", 120 * SECOND),
        (" 120 ", 120 * SECOND),
        ("Mon, 01 Jun 2026 12:01:30 GMT", 90 * SECOND),
        ("Monday, 01-Jun-26 12:01:30 GMT", 90 * SECOND),
        ("2026-06-01T12:01:30Z", 90 * SECOND),
        ("1.5", 1_500),
        ("45, 10", 45 * SECOND),
        ("Mon Jun  1 12:01:30 2026", 90 * SECOND),
        (str(NOW // 1_000 + 90), 90 * SECOND),
        (str(NOW // 1_000 + 31 * 86_400), CAP),
        ("5m", 5 * MINUTE),
        ("2h", 2 * HOUR),
        ("99999999999999", CAP),
        ("0", None),
        ("-5", None),
        ("0x10", None),
        ("soon", None),
        ("", None),
        ("٣", None),
        ("1" * 5_000, None),
        ("Mon, 01 Jun 2026 11:59:59 GMT", None),
        ("Mon, 99 Jun 2026 11:59:59 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date_or_a_duration(value: str, wait: int | None) -> None:
    assert from_headers({"Retry-After": value}) == wait


@pytest.mark.parametrize("value", ["0", "", "soon", "Mon, 01 Jun 2026 11:59:59 GMT"])
def test_a_useless_retry_after_hides_every_other_header(value: str) -> None:
    others = {"x-ratelimit-reset": str(NOW // 1_000 + 60), "retry-after-ms": "900", "ratelimit-reset": "30"}
    assert from_headers({"retry-after": value} | others) is None


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        (str(NOW // 1_000 + 60), MINUTE),
        (str(NOW + 250), 250),
        (str(NOW // 1_000 - 60), None),
        ("60", MINUTE),
        ("1m30s", 90 * SECOND),
        ("10000000000", CAP),
    ],
)
def test_the_reset_header_is_epoch_time_or_a_short_number_of_seconds(value: str, wait: int | None) -> None:
    assert from_headers({"X-RateLimit-Reset": value}) == wait


def test_a_short_reset_number_does_not_count_while_requests_remain() -> None:
    assert from_headers({"x-ratelimit-reset": "60", "x-ratelimit-remaining": "3"}) is None


def test_without_the_extension_only_the_reference_headers_are_read() -> None:
    for headers in (
        {"x-ratelimit-reset": "60"},
        {"retry-after-ms": "5"},
        {"ratelimit-reset": "5"},
        {"retry-after": "5s"},
    ):
        assert from_headers(headers, extended=False) is None
        assert from_headers(headers) is not None


def test_a_dimension_with_something_left_does_not_count() -> None:
    headers = {
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "1h",
        "x-ratelimit-reset-tokens": "2h",
    }
    assert from_headers(headers) is None


def test_the_latest_spent_dimension_counts_over_all_spellings() -> None:
    headers = {
        "x-ratelimit-remaining-requests-day": "0",
        "x-ratelimit-reset-requests-day": "2m",
        "anthropic-ratelimit-output-tokens-remaining": "0",
        "anthropic-ratelimit-output-tokens-reset": "2026-06-01T12:05:00Z",
        "x-rate-limit-remaining-tokens": "4",
        "x-rate-limit-reset-tokens": "9h",
    }
    assert from_headers(headers) == 5 * MINUTE


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ('"default";r=0;t=30', 30 * SECOND),
        ("limit=10, remaining=0, reset=50", 50 * SECOND),
        ('"default";r=5;t=30', None),
        ("limit=10, remaining=0", None),
    ],
)
def test_a_structured_limit_counts_when_nothing_remains(value: str, wait: int | None) -> None:
    assert from_headers({"RateLimit": value}) == wait


def test_a_rejected_window_counts_where_the_unified_reset_is_missing() -> None:
    headers = {
        "anthropic-ratelimit-unified-status": "rejected",
        "anthropic-ratelimit-unified-5h-status": "allowed",
        "anthropic-ratelimit-unified-5h-reset": str(NOW // 1_000 + 60),
        "anthropic-ratelimit-unified-7d-status": "rejected",
        "anthropic-ratelimit-unified-7d-reset": str(NOW // 1_000 + 600),
    }
    assert from_headers(headers) == 600 * SECOND


def test_allowed_windows_state_no_wait() -> None:
    headers = {
        "anthropic-ratelimit-unified-status": "allowed",
        "anthropic-ratelimit-unified-reset": str(NOW // 1_000 + 60),
        "anthropic-ratelimit-unified-5h-status": "allowed",
        "anthropic-ratelimit-unified-5h-reset": str(NOW // 1_000 + 60),
    }
    assert from_headers(headers) is None


def test_the_later_of_two_used_up_windows_counts_and_reset_at_stands_in() -> None:
    headers = {
        "x-codex-primary-used-percent": "100",
        "x-codex-primary-reset-after-seconds": "60",
        "x-codex-secondary-used-percent": "101.5",
        "x-codex-secondary-reset-at": str(NOW // 1_000 + 90),
    }
    assert from_headers(headers) == 90 * SECOND


@pytest.mark.parametrize(
    ("delay", "wait"),
    [
        ("26.660853464s", 26_661),
        ("250ms", 250),
        ("2m", 2 * MINUTE),
        ("7", 7 * SECOND),
        (7, 7 * SECOND),
        ({"seconds": 34, "nanos": 74_824_224}, 34_075),
        ("72h", DAY),
        ("-3s", None),
        ("5ſ", None),
        ("5mſ", None),
        ("0s", None),
        ("soon", None),
        (float("inf"), None),
        (True, None),
    ],
)
def test_retry_info_is_a_protobuf_duration_of_at_most_a_day(delay: object, wait: int | None) -> None:
    body = {"error": {"details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]}}
    assert from_body(body) == wait


@pytest.mark.parametrize(
    ("body", "wait"),
    [
        ({"retryAfter": "2026-06-01T12:00:05Z"}, 5 * SECOND),
        ({"retry_after_ms": 1_500.2}, 1_501),
        ({"error": {"retryAfter": "20"}}, 20 * SECOND),
        ({"error": {"retry_after": "30s"}}, 30 * SECOND),
        ({"error": {"resets_at": NOW // 1_000 + 9}}, 9 * SECOND),
        ({"error": {"reset_time": "2026-06-01 12:00:09"}}, 9 * SECOND),
        ({"error": {"resets_at": 60}}, None),
        ({"error": {"retry_after": False}}, None),
        ({"error": {"metadata": {"retry_after_seconds": 17}}}, 17 * SECOND),
        ({"error": {"metadata": {"headers": {"X-RateLimit-Reset": str(NOW + 30_000)}}}}, 30 * SECOND),
        ([{"error": {"retry_after": 3}}], 3 * SECOND),
        ({"error": '{"error": {"retry_after": 4}}'}, 4 * SECOND),
        ({"retry_after": 10**400}, None),
        ({"error": {"details": [{"metadata": {"quotaResetDelay": "1h2m3.5s"}}]}}, HOUR + 2 * MINUTE + 3_500),
        ("text", None),
        (None, None),
    ],
)
def test_the_body_states_a_wait_in_many_members(body: object, wait: int | None) -> None:
    assert from_body(body) == wait


def test_the_error_object_is_read_before_the_root() -> None:
    assert from_body({"retry_after": 5, "error": {"retry_after": 20}}) == 20 * SECOND


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("Please retry in 36.5s.", 36_500),
        ("Please retry in 90000s", DAY),
        ("try again at 2026-06-01 12:00:10", 10 * SECOND),
        ("wait until 2026-06-01T14:00:10+02:00", 10 * SECOND),
        ("try again at 2026-06-01 11:59:59", None),
        ("Quota will reset after 2h30m", 2 * HOUR + 30 * MINUTE),
        ("resets in 3 days", 3 * DAY),
        ("reset at 06-01 12:00:30 UTC", 30 * SECOND),
        ("reset at 05-31 12:00 UTC", CAP),
        ("reset at 02-31 12:00 UTC", None),
        ("Retrying in 5 seconds", 5 * SECOND),
        ("wait for another 30 sec", 30 * SECOND),
        ("Wait 5 hours, 3 minutes and 2 s", 5 * HOUR + 3 * MINUTE + 2 * SECOND),
        ("back in 1w", 7 * DAY),
        ("cool-down: 30s", 30 * SECOND),
        ("retry after 1 minute(s)", MINUTE),
        ("access returns on 2026-06-02 at 00:00 UTC", 12 * HOUR),
        ("resets 3pm (Europe/Berlin)", HOUR),
        ("resets 2am (Etc/GMT-9)", 5 * HOUR),
        ("resets at 12:30 UTC", 30 * MINUTE),
        ("resets at 12:00 UTC", DAY),
        ("resets 15:30 UTC+3", 30 * MINUTE),
        ("resets Jun 3 at 12pm (UTC)", 2 * DAY),
        ("resets Jun 3, 2025, 12pm (UTC)", None),
        ("limit reached|1780315260", MINUTE),
        ("resets 12am (UTC)", 12 * HOUR),
        ("resets 1am (UTC)", 13 * HOUR),
        ("resets 6:30pm UTC+0530", HOUR),
        ("429 quota [links {}\n, retry_delay {\n  seconds: 44\n}\n]", 44 * SECOND),
        ("429 PerDay quota [retry_delay {\n  seconds: 44\n}\n]", None),
    ],
)
def test_words_of_waiting_are_read(text: str, wait: int | None) -> None:
    assert from_text(text) == wait


@pytest.mark.parametrize(
    "text",
    [
        "try again later",
        "limit 20 requests per minute exceeded, try again later",
        "input exceeds limit 200000, decrease it and try again",
        "Rate limit of 50 per 86400s exceeded",
        "retry 3 times",
        "available 5M tokens",
        "available: 5m tokens, retry later",
        "reset every 24 hours",
        "Available balance 5 USD",
        "resets at 9:30 AM",
        "resets Oct 6, 10am.",
        "resets 25:00 UTC",
        "resets 13pm (UTC)",
        "resets 0am (UTC)",
        "resets 3pm (Europe/Atlantis)",
        "resets 3pm (../../etc/passwd)",
        "feedback 5s",
        "If you recently changed the key, try again after 5 minutes.",
        "try again in 5 messages",
    ],
)
def test_a_number_that_is_no_wait_is_no_hint(text: str) -> None:
    assert from_text(text) is None


def test_a_request_larger_than_its_limit_gets_no_wait() -> None:
    text = "Limit 7000, Used 0, Requested {}. Please try again in 50s."
    assert from_text(text.format("~12903")) is None
    assert from_text(text.format("7000")) == 50 * SECOND


def test_a_limit_of_zero_gets_no_wait() -> None:
    assert from_text("Quota exceeded, limit: 0, model: m. Please retry in 35s.") is None


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("请在20秒后重试", 20 * SECOND),
        ("請於 2 分鐘後再試", 2 * MINUTE),
        ("1小时30分钟后重试", 90 * MINUTE),
        ("额度将在 2026-06-01 13:00:00 重置", HOUR),
        ("请等待 30 秒", 30 * SECOND),
        ("请求过于频繁，请稍后再试", None),
        ("限制为每20秒1次", None),
        ("20秒後に再試行してください", 20 * SECOND),
        ("20초 후에 다시 시도하세요", 20 * SECOND),
        ("Veuillez réessayer dans 30 secondes", 30 * SECOND),
        ("Versuchen Sie es in 10 Minuten erneut", 10 * MINUTE),
        ("Inténtelo de nuevo en 20 segundos", 20 * SECOND),
        ("tente novamente em 20 segundos", 20 * SECOND),
        ("riprova tra 20 secondi", 20 * SECOND),
        ("Повторите попытку через 5 минут", 5 * MINUTE),
        ("20 saniye sonra tekrar deneyin", 20 * SECOND),
    ],
)
def test_other_languages_are_read_from_data(text: str, wait: int | None) -> None:
    assert from_text(text) == wait


def test_the_reference_wording_beats_an_extended_one_that_stands_earlier() -> None:
    assert from_text("wait 5 minutes or so; please retry in 7s") == 7 * SECOND


def test_extended_wordings_are_read_in_the_message_of_the_error_object_only() -> None:
    body = {"error": {"message": "bad tool call"}, "echo": "say: wait 5 minutes"}
    assert read_hint({}, body, str(body), NOW, HintProfile()) is None


def test_switched_off_texts_leave_the_reference_wordings() -> None:
    off = HintProfile(extended_texts=False)
    assert from_text("try again in 20s", profile=off) is None
    assert from_text("请在20秒后重试", profile=off) is None
    assert from_text("resets in 20m", profile=off) == 20 * MINUTE


def test_a_fraction_is_rounded_up_without_binary_noise() -> None:
    assert from_text("please retry in 64.1s") == 64_100
    assert from_text("please retry in 0.0001s") == 1


def test_a_stated_zero_is_told_for_display_but_is_no_hint() -> None:
    assert stated_wait_ms({"retry-after": "0"}, None, "", NOW, HintProfile()) == 0
    assert stated_wait_ms({"retry-after": "0"}, None, "please retry in 5s", NOW, HintProfile()) == 5_000
    assert stated_wait_ms({"retry-after-ms": "1"}, None, "", NOW, HintProfile()) == 1
    assert stated_wait_ms({}, None, "nothing said", NOW, HintProfile()) is None
    assert read_hint({"retry-after": "0"}, None, "", NOW, HintProfile()) is None


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("Monthly usage limit reached. It resets in 3 days.", 3 * DAY),
        ("resets in 1 hour", HOUR),
        ("Resets in 45 minutes", 45 * MINUTE),
        ("resets in 10 seconds", 10 * SECOND),
        ("resets in 400 days", CAP),
        ("resets in 0 days", None),
        ("resets in a while", None),
        ("resets soon", None),
    ],
)
def test_the_helper_of_provider_rules_reads_resets_in(text: str, wait: int | None) -> None:
    assert parse_resets_in(text) == wait
