"""The throughput watchdog at its boundaries (spec/watchdog.md sections 1 to 3)."""

from __future__ import annotations

import pytest

from policy_service.domain import setting_specs  # noqa: F401  (fills the registry)
from policy_service.domain.settings import ENV_ALIASES, REGISTRY, SettingSources
from policy_service.domain.watchdog import (
    ABORT_CODE,
    ABORT_FAILURE_KIND,
    ABORT_REASON,
    EXACT_SAMPLES,
    START,
    Verdict,
    WatchdogSettings,
    WatchState,
    observe,
)

QUICK = WatchdogSettings(enabled=True, warmup_ms=0, window_ms=1_000, min_useful_bytes_per_second=10, min_useful_bytes=3)


def play(
    settings: WatchdogSettings, *events: tuple[int, int] | tuple[int, int, bool]
) -> tuple[WatchState, list[Verdict]]:
    """State and verdicts after events of (time, useful bytes, protected)."""
    state, verdicts = START, []
    for at, useful_bytes, *protected in events:
        state, verdict = observe(state, useful_bytes, bool(protected and protected[0]), at, settings)
        verdicts.append(verdict)
    return state, verdicts


def last(settings: WatchdogSettings, *events: tuple[int, int] | tuple[int, int, bool]) -> Verdict:
    return play(settings, *events)[1][-1]


def test_an_abort_has_the_names_that_clients_and_statistics_know() -> None:
    assert (ABORT_REASON, ABORT_CODE, ABORT_FAILURE_KIND) == (
        "throughput_too_low",
        "STREAM_THROUGHPUT_TOO_LOW",
        "timeout",
    )
    assert [verdict.value for verdict in Verdict] == ["CONTINUE", "ABORT"]


def test_the_defaults_of_the_core_are_those_of_the_settings() -> None:
    defaults = {f"stream_watchdog.{name}": value for name, value in WatchdogSettings()._asdict().items()}

    assert {name: REGISTRY[name].default for name in defaults} == defaults
    assert sum(name.startswith("stream_watchdog.") for name in REGISTRY) == len(defaults)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("warmup_ms", 0, 600_000),
        ("window_ms", 1_000, 600_000),
        ("min_useful_bytes_per_second", 1, 1_000_000),
        ("min_useful_bytes", 1, 1_000_000),
    ],
)
def test_stored_values_are_clamped_to_the_range(name: str, low: int, high: int) -> None:
    full = f"stream_watchdog.{name}"

    assert SettingSources({full: low - 1}).resolve(full) == low
    assert SettingSources({full: high + 1}).resolve(full) == high
    assert SettingSources({full: low}).resolve(full) == low
    assert SettingSources({full: high}).resolve(full) == high
    assert SettingSources({}, {f"POLICY_STREAM_WATCHDOG_{name.upper()}": "7777"}).resolve(full) == 7777


def test_the_switch_has_an_older_variable() -> None:
    name = "stream_watchdog.enabled"

    assert ENV_ALIASES[name] == "STREAM_THROUGHPUT_WATCHDOG_ENABLED"
    assert SettingSources({}, {ENV_ALIASES[name]: "true"}).resolve(name) is True
    assert SettingSources({}, {ENV_ALIASES[name]: "true", "POLICY_STREAM_WATCHDOG_ENABLED": "0"}).resolve(name) is False


def test_a_stream_is_judged_from_warm_up_plus_window_on_counted_from_its_first_event() -> None:
    settings = QUICK._replace(warmup_ms=500)

    assert settings.is_judged_after_ms == 1_500
    assert last(settings, (700, 0), (2_199, 0)) is Verdict.CONTINUE
    assert last(settings, (700, 0), (2_200, 0)) is Verdict.ABORT


@pytest.mark.parametrize("first", [(0, 0), (0, 20), (0, 0, True)])
def test_the_first_event_of_any_kind_starts_the_warm_up(first: tuple[int, int]) -> None:
    state, _ = play(QUICK, first)

    assert state.started_at == 0
    assert play(QUICK, first, (400, 1))[0].started_at == 0
    assert play(QUICK, first, (400, 0, True))[0].started_at == 0


def test_a_stream_of_time_zero_has_started() -> None:
    assert last(QUICK, (0, 0), (1_000, 0)) is Verdict.ABORT


@pytest.mark.parametrize(
    ("size", "verdict"),
    [(0, Verdict.ABORT), (1, Verdict.CONTINUE), (2, Verdict.CONTINUE), (3, Verdict.ABORT), (9, Verdict.ABORT),
     (10, Verdict.CONTINUE)],
)  # fmt: skip
def test_nothing_and_enough_to_measure_are_judged_too_little_is_not(size: int, verdict: Verdict) -> None:
    assert last(QUICK, (0, 0), (900, size), (1_000, 0)) is verdict


def test_a_window_of_less_than_a_second_counts_as_a_second() -> None:
    short = QUICK._replace(window_ms=500, min_useful_bytes_per_second=1_000)

    assert last(short, (0, 0), (499, 999), (500, 0)) is Verdict.ABORT
    assert last(short, (0, 0), (499, 1_000), (500, 0)) is Verdict.CONTINUE


def test_a_sample_of_exactly_the_age_of_the_window_stays_and_an_older_one_goes() -> None:
    assert play(QUICK, (0, 0), (1_000, 50), (2_000, 0))[0].window_bytes == 50
    state, verdicts = play(QUICK, (0, 0), (1_000, 50), (2_001, 0))

    assert (state.window_bytes, state.sample_count, verdicts[-1]) == (0, 0, Verdict.ABORT)


def test_samples_leave_the_window_one_by_one_oldest_first() -> None:
    events = [(100, 1), (200, 2), (300, 4), (400, 8)]
    left = [play(QUICK, *events, (at, 0))[0].window_bytes for at in (1_100, 1_101, 1_201, 1_301, 1_401)]

    assert left == [15, 14, 12, 8, 0]


def test_samples_added_after_the_first_ones_left_are_kept_in_order() -> None:
    state, _ = play(QUICK, (0, 1), (10, 2), (1_005, 4), (1_006, 8), (1_011, 0))

    assert (state.window_bytes, state.sample_count) == (12, 2)
    assert play(QUICK, (0, 1), (10, 2), (1_005, 4), (1_006, 8), (2_006, 0))[0].window_bytes == 8


def test_events_of_one_chunk_are_one_sample() -> None:
    state, _ = play(QUICK, (5, 1), (6, 2), (6, 4), (6, 8), (7, 16))

    assert (state.window_bytes, state.sample_count) == (31, 3)
    assert play(QUICK, (5, 1), (6, 2), (6, 4), (7, 16), (1_006, 0))[0].window_bytes == 22
    assert play(QUICK, (5, 1), (6, 2), (6, 4), (7, 16), (1_007, 0))[0].window_bytes == 16


def test_output_of_the_same_instant_ends_the_protection_too() -> None:
    state, _ = play(QUICK, (0, 1), (5, 2), (5, 0, True), (5, 4))

    assert (state.protected, state.window_bytes, state.sample_count) == (False, 7, 2)


def test_bytes_of_a_protected_event_count_for_nothing() -> None:
    state, _ = play(QUICK, (0, 50, True))

    assert (state.window_bytes, state.sample_count, state.protected) == (0, 0, True)


def test_bytes_below_zero_count_as_none() -> None:
    state, _ = play(QUICK, (0, 0, True), (1, -5))

    assert (state.window_bytes, state.protected) == (0, True)


def test_a_stream_that_ends_in_a_tool_phase_is_not_judged_again() -> None:
    assert play(QUICK, (0, 0), (500, 0, True), (5_000, 0), (90_000, 0))[1] == [Verdict.CONTINUE] * 4


def test_output_ends_the_protection_and_the_next_lull_is_judged() -> None:
    assert last(QUICK, (0, 0, True), (500, 1), (1_501, 0)) is Verdict.ABORT


@pytest.mark.parametrize(("size", "verdict"), [(14, Verdict.ABORT), (15, Verdict.CONTINUE)])
def test_the_rate_is_bytes_over_the_whole_window(size: int, verdict: Verdict) -> None:
    settings = QUICK._replace(window_ms=1_500)

    assert last(settings, (0, 0), (1_000, size), (1_500, 0)) is verdict


def test_the_rate_is_compared_without_rounding() -> None:
    settings = QUICK._replace(min_useful_bytes_per_second=999_999)

    assert last(settings, (0, 0), (900, 999_998), (1_000, 0)) is Verdict.ABORT
    assert last(settings, (0, 0), (900, 999_999), (1_000, 0)) is Verdict.CONTINUE


@pytest.mark.parametrize(("size", "verdict"), [(9, Verdict.ABORT), (10, Verdict.CONTINUE)])
def test_a_window_below_a_second_counts_as_one(size: int, verdict: Verdict) -> None:
    assert last(QUICK._replace(window_ms=100), (0, 0), (100, size), (150, 0)) is verdict


def test_switched_off_nothing_is_judged_but_the_window_is_kept() -> None:
    state, verdicts = play(QUICK._replace(enabled=False), (0, 4), (500, 1), (1_000, 0))

    assert (verdicts[-1], state.window_bytes) == (Verdict.CONTINUE, 5)


def test_a_fast_stream_keeps_no_more_samples_than_can_decide() -> None:
    sizes = [(at, 10) for at in range(900)]
    state, verdicts = play(QUICK, *sizes)

    assert state.sample_count == EXACT_SAMPLES == 64
    assert set(verdicts) == {Verdict.CONTINUE}


def test_the_window_is_exact_up_to_the_samples_kept_in_any_case() -> None:
    state, _ = play(QUICK, *((at, 10) for at in range(EXACT_SAMPLES)))
    more, _ = observe(state, 10, False, EXACT_SAMPLES, QUICK)

    assert (state.window_bytes, state.sample_count) == (640, 64)
    assert (more.window_bytes, more.sample_count) == (640, 64)


def test_samples_that_a_verdict_needs_are_kept_however_many_they_are() -> None:
    settings = QUICK._replace(min_useful_bytes_per_second=500)
    state, _ = play(settings, *((at, 1) for at in range(900)))

    assert state.sample_count == state.window_bytes == 500
    assert play(settings, *((at, 1) for at in range(400)))[0].sample_count == 400
