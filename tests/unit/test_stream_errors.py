"""Errors among the events of a body: however the stream is written, and how much of it is looked at."""

from __future__ import annotations

import json

import pytest

from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.stream_errors import may_hold_error, stream_error

ERROR = {"error": {"message": "m", "code": 503}}
WRITTEN = json.dumps(ERROR)


def told(body: str, status: int = 200) -> tuple[int | None, str]:
    outcome = parse_outcome(RawOutcome(status=status, body=body.encode()))
    return outcome.status, outcome.message


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "start", ["", "{0}", "\ufeff", ": hi{0}", "data: {{}}{0}{0}", "id: 1{0}event: message{0}data: x{0}{0}"]
)
def test_an_error_event_is_read_with_every_line_end_behind_every_beginning(start: str, end: str) -> None:
    beginning = start.format(end)
    assert stream_error(f"{beginning}event: error{end}data: {WRITTEN}{end}{end}") == ERROR
    assert stream_error(f"{beginning}data: {WRITTEN}{end}") == ERROR


@pytest.mark.parametrize(
    "between", ["id: 7\n", "retry: 3000\n", ": hi\n", "\n", " \n", "id: 7\n:\nretry: 1\n", ":\n" * 16]
)
def test_lines_between_the_name_of_an_error_and_its_data_are_not_its_message(between: str) -> None:
    assert stream_error(f"event: error\n{between}data: busy\n\n") == {"error": {"message": "busy"}}
    assert told(f"event: error\n{between}data: busy\n\n") == (500, "busy")


def test_further_lines_between_a_name_and_its_data_end_the_reading() -> None:
    assert stream_error("event: error\n" + ":\n" * 17 + "data: busy\n\n") is None


@pytest.mark.parametrize("name", ["event: error", "event:error", "event: \terror \t"])
def test_the_name_of_an_error_event_is_that_word_alone(name: str) -> None:
    plain = name if name != "event: \terror \t" else "event: error \t"
    assert stream_error(f"{plain}\ndata: busy\n\n") == {"error": {"message": "busy"}}
    for other in (f"{plain.strip()}s", f"{plain.strip()} none"):
        assert stream_error(f"{other}\ndata: busy\n\n") is None


@pytest.mark.parametrize("name", ["", "event: error\n"])
def test_an_error_written_over_several_lines_is_one_event(name: str) -> None:
    lines = "".join(f"data: {line}\n" for line in json.dumps(ERROR, indent=2).split("\n"))
    for start in ("", "\n", "event: x\n", ": hi\n"):
        assert stream_error(f"{start}{name}{lines}") == ERROR
    assert stream_error(f"data: {{}}\n\n{name}{lines}\n") == ERROR
    assert told(f"data: {{}}\n\n{name}{lines}\n") == (503, "m")


def test_words_over_several_lines_are_one_message() -> None:
    assert stream_error("event: error\ndata: all\ndata: busy\n\ndata: more\n\n") == {"error": {"message": "all\nbusy"}}


def test_an_event_is_read_over_as_many_lines_as_announced() -> None:
    def written(before: int, behind: int) -> str:
        inner = ["{", *['"a": 1,'] * (before - 1), '"error": "m",', *['"b": 1,'] * (behind - 2), '"c": 1', "}"]
        return "".join(f"data: {line}\n" for line in inner)

    assert stream_error(written(64, 64)) is not None
    assert stream_error("data: x\n\n" + written(64, 64)) is not None
    assert stream_error(written(65, 64)) is None
    assert stream_error(written(64, 65)) is None


def test_an_event_of_more_lines_than_are_joined_is_not_tried_again_from_its_middle() -> None:
    """From the 65th line all 128 are within reach, but a body of nothing else would be joined over and over."""
    lines = ['data: {"error": {"message": "m"},'] + ['data: "n": 1,'] * 126 + ['data: "n": 1}']
    lines[64] = 'data: "code": 1,'
    assert stream_error("\n".join(lines) + "\n\n") is None


@pytest.mark.parametrize(("length", "found"), [(8_192, True), (8_193, False)])
def test_an_event_is_read_over_as_many_characters_as_announced(length: int, found: bool) -> None:
    for first, last in (("length", "2"), ("2", "length")):
        before = 'data: {"a": "' if first == "length" else "data: {"
        behind = 'data: "b": "' if last == "length" else "data: }"
        before = f'{before.ljust(length - 3, "x")}",\n' if first == "length" else f"{before}\n"
        behind = f'{behind.ljust(length - 2, "x")}"}}' if last == "length" else behind
        comma = "," if last == "length" else ""
        assert (stream_error(f'x\n\n{before}data: "error": "m"{comma}\n{behind}') is not None) is found


def test_lines_without_a_gap_are_events_of_their_own_where_they_are_whole() -> None:
    assert stream_error(f'data: {{"note": "failed"}}\ndata: {WRITTEN}\ndata: {{}}\n') == ERROR
    assert stream_error(f'data: "error\ndata: {WRITTEN}\n') == ERROR


@pytest.mark.parametrize(
    "text",
    [
        "event: error\n", "event: error", "event: error\n\n", "event: error\nevent: message\ndata: busy\n",
        "event: error\ndata:\n\n", ': {"error": "m"}\n', 'id: {"error": "m"}\n', 'data: {"error":\n', "words\n" * 9,
        'event: error\ndata: [1]\n\n', 'data: {"delta": "failed"}\n',
    ],
)  # fmt: skip
def test_no_error_is_made_up(text: str) -> None:
    assert stream_error(text) is None


def test_the_first_error_decides() -> None:
    later = json.dumps({"error": {"message": "later"}})
    assert stream_error(f"data: {WRITTEN}\n\ndata: {later}\n\n") == ERROR
    assert stream_error("event: error\nevent: error\ndata: busy\n\n") == {"error": {"message": "busy"}}


def test_an_object_of_an_error_event_is_an_error_whatever_it_says() -> None:
    assert stream_error('event: error\ndata: {"message": "m"}\n\n') == {"error": {"message": "m"}}
    assert told("event: error\ndata: {}\n\n")[0] == 500


def test_as_many_lines_with_a_mark_are_read_as_announced() -> None:
    assert stream_error('{"x": "failed"}\n' * 127 + WRITTEN) == ERROR
    assert stream_error('{"x": "failed"}\n' * 128 + WRITTEN) is None
    assert stream_error('{"x": 1}\n' * 2_000 + WRITTEN) == ERROR


MARKED = (
    '"error', '"Error', "event: error", "event:error", "failed", "base_resp", '"success"', '"code"',
)  # fmt: skip


@pytest.mark.parametrize("mark", MARKED)
def test_each_mark_makes_a_success_worth_reading(mark: str) -> None:
    assert may_hold_error(f"x{mark}x")
    assert not may_hold_error(f"x{mark[:-1]}")


@pytest.mark.parametrize("status", [200, 502])
def test_the_error_that_ends_a_list_of_chunks_is_found(status: int) -> None:
    chunks: list[object] = [{"candidates": [{"content": {}}]}] * 9
    body = json.dumps([*chunks, ERROR])
    assert told(body, status) == (503 if status == 200 else 502, "m")
    assert told(json.dumps([{"a": 1}, {"b": "error"}]))[0] == 200
    assert told(json.dumps(["x", 5, ERROR]))[0] == 503


def test_as_many_parts_of_a_list_are_read_from_its_end_as_announced() -> None:
    rest = [{"x": '"error'}] * 127
    assert told(json.dumps([{}, ERROR, *rest]))[0] == 503
    assert told(json.dumps([{}, ERROR, *rest, {}]))[0] == 200
    assert told(json.dumps([ERROR, {"error": {"message": "later"}}])) == (503, "m")


def _event(*lines: str) -> str:
    return "".join(f"data: {line}\n" for line in lines) + "\n"


def test_lines_before_the_one_with_the_mark_keep_their_order() -> None:
    assert stream_error(_event("{", '"id": 1,', '"error": {"code": 503}}')) == {"id": 1, "error": {"code": 503}}


def test_a_body_may_begin_with_the_mark_of_an_error_over_several_lines() -> None:
    assert stream_error(_event('{"error":', '{"code": 503}}')) == {"error": {"code": 503}}


def test_an_error_over_several_lines_right_behind_an_event_over_several_lines_is_found() -> None:
    harmless = _event('{"code": 1,', '"a": 1,', '"b": 2,', '"c": 3}')
    assert stream_error(harmless + _event('{"error":', '{"code": 503}}')) == {"error": {"code": 503}}


def test_an_error_right_behind_an_event_of_many_short_lines_is_found() -> None:
    harmless = _event('{"code": 1,', *['"a": 1,'] * 12, '"b": 2}')
    assert stream_error(harmless + _event('{"error":', '"m"}')) == {"error": "m"}
