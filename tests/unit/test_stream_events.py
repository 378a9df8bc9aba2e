"""Cutting a stream into events, and what an event says (spec/watchdog.md section 4)."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from policy_service.domain.outcome_parsing import RawOutcome, parse_outcome
from policy_service.domain.stream_events import (
    EVENT_LIMIT,
    HEAD_BYTES,
    EventReading,
    EventSplitter,
    StreamEvent,
    StreamFormat,
    analyse,
    carries_error,
    error_body,
    read_block,
    read_event,
)

CHAT, RESPONSES, ANTHROPIC, GEMINI, UNKNOWN = (known.value for known in StreamFormat)


def events(*chunks: bytes, limit: int = EVENT_LIMIT) -> list[StreamEvent]:
    splitter = EventSplitter(limit)
    return [event for chunk in chunks for event in splitter.feed(chunk)]


def reading(format: str, body: object, name: str = "") -> EventReading:
    return read_event(format, StreamEvent(name, body if isinstance(body, str) else json.dumps(body)))


def chat(**delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta}]}


def parts(*found: dict[str, object]) -> dict[str, object]:
    return {"candidates": [{"content": {"parts": list(found)}}]}


# --- cutting


def test_events_end_at_a_blank_line_of_either_kind() -> None:
    text = b"data: 1\n\ndata: 2\r\n\r\ndata: 3\n\r\ndata: 4\r\n\n"

    assert [event.data for event in events(text)] == ["1", "2", "3", "4"]


def test_blank_lines_between_events_are_no_events() -> None:
    assert [event.data for event in events(b"\n\r\n\n", b"data: 1\n\n\n\n\r", b"\n\ndata: 2\n\n\n")] == ["1", "2"]


def test_a_heartbeat_is_an_event_without_data() -> None:
    assert events(b": keep-alive\n\n") == [StreamEvent("", "")]


def test_fields_are_read_as_the_standard_says() -> None:
    block = b"\xef\xbb\xbfevent: error\r\nid: 7\r\nretry\r\ndata:a\r\ndata:  b\r\ndata\r\n:data: c"

    assert read_block(block) == StreamEvent("error", "a\n b\n")
    assert read_block(b"event: a\nevent:b\nDATA: x\n data: y") == StreamEvent("b", "")


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert read_block(b"data: \xff\xfe!") == StreamEvent("", "��!")


def test_the_tail_waits_for_the_next_chunk() -> None:
    splitter = EventSplitter()

    assert splitter.feed(b"data: 1\n\nevent: x\ndata: 2") == [StreamEvent("", "1")]
    assert splitter.tail == b"event: x\ndata: 2"
    assert splitter.feed(b"\n") == []
    assert splitter.feed(b"\n") == [StreamEvent("x", "2")]
    assert splitter.tail == b""


@pytest.mark.parametrize(("rest", "found"), [(b"data: 2", "2"), (b"data: 2\n", "2"), (b"data: 2\r\n", "2")])
def test_the_end_of_the_stream_completes_an_event(rest: bytes, found: str) -> None:
    splitter = EventSplitter()
    splitter.feed(b"data: 1\n\n" + rest)

    assert splitter.finish() == [StreamEvent("", found)]
    assert (splitter.tail, splitter.finish()) == (b"", [])
    assert splitter.feed(b"data: 3\n\n") == [StreamEvent("", "3")]


def test_an_event_name_alone_is_an_event_at_the_end_and_a_comment_is_none() -> None:
    named, silent = EventSplitter(), EventSplitter()
    named.feed(b"event: message_stop\n")
    silent.feed(b": bye\n")

    assert named.finish() == [StreamEvent("message_stop", "")]
    assert silent.finish() == []


# --- memory


def test_an_event_of_the_limit_is_read_whole_and_a_longer_one_is_cut() -> None:
    whole, longer = b"data: " + b"x" * 2_042, b"data: " + b"x" * 2_043

    assert events(whole + b"\r\n\r\n", limit=2_048) != events(whole + b"\n\n", limit=2_048)
    assert events(whole + b"\n\n", limit=2_048) == [StreamEvent("", "x" * 2_042)]
    assert events(longer + b"\n\n", limit=2_048) == [StreamEvent("", "x" * (HEAD_BYTES - 6), is_cut=True)]


def test_of_an_event_that_is_too_long_only_what_may_begin_its_end_is_kept() -> None:
    within, beyond = EventSplitter(limit=10), EventSplitter(limit=10)
    within.feed(b"x" * 12)
    beyond.feed(b"x" * 13)

    assert (len(within.tail), len(beyond.tail)) == (12, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 2_047, 2_048, 2_049, 2_050, 2_051, 2_052])
@pytest.mark.parametrize("length", [2_047, 2_048, 2_049, 2_050, 2_051, 9_000])
def test_a_long_event_reads_the_same_however_it_is_cut(length: int, size: int) -> None:
    text = b"event: a\ndata: ".ljust(length, b"x") + b"\n\r\ndata: next\n\n"
    chunks = [text[start : start + size] for start in range(0, len(text), size)]

    found = events(*chunks, limit=2_048)

    assert found == events(text, limit=2_048)
    assert [event.is_cut for event in found] == [length > 2_048, False]
    assert [event.name for event in found] == ["a", ""]


def test_the_limits_of_an_event_are_a_mebibyte_and_a_kibibyte_of_what_is_longer() -> None:
    whole = b"data: " + b"x" * (1_048_576 - 6)

    assert (EVENT_LIMIT, HEAD_BYTES) == (1_048_576, 1_024)
    assert [event.is_cut for event in events(whole + b"\n\n", whole + b"x\n\n")] == [False, True]


def test_a_limit_below_the_head_holds_as_well() -> None:
    assert events(b"data: 0123456789", b"0123\n\n", limit=10) == [StreamEvent("", "0123", is_cut=True)]


def test_an_endless_event_costs_no_memory() -> None:
    splitter = EventSplitter(limit=10_000)
    chunk = b"x" * 65_536
    tracemalloc.start()
    try:
        splitter.feed(b"event: long\ndata: ")
        for _ in range(320):
            assert splitter.feed(chunk) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(splitter.tail) == 2
    assert peak < 4 * len(chunk)
    assert splitter.feed(b"\n\ndata: 1\n\n") == [
        StreamEvent("long", "x" * (HEAD_BYTES - 18), is_cut=True),
        StreamEvent("", "1"),
    ]


def test_an_overlong_event_can_not_end_a_healthy_stream() -> None:
    assert read_event(CHAT, StreamEvent("", '{"choices": [', is_cut=True)) == EventReading(protected=True)
    assert read_event(RESPONSES, StreamEvent("response.completed", "{", True)) == EventReading(0, True, False, True)
    assert read_event(ANTHROPIC, StreamEvent("error", "{", True)) == EventReading(0, True, True, False)


def test_an_overlong_event_at_the_end_is_cut_too() -> None:
    splitter = EventSplitter(limit=10)
    splitter.feed(b"data: 0123456789")

    assert splitter.finish() == [StreamEvent("", "0123", is_cut=True)]


# --- useful bytes and protected phases


@pytest.mark.parametrize(
    "data", ["", "[DONE]", "{broken", "[" * 100_000, "nothing", "1" * 5_000 + "x", '{"a": ' * 50_000]
)
@pytest.mark.parametrize("format", [CHAT, RESPONSES, ANTHROPIC, GEMINI, UNKNOWN])
def test_data_that_is_no_json_counts_for_nothing_whatever_the_event_is_called(format: str, data: str) -> None:
    assert analyse(format, "response.reasoning.delta", data) == (0, False)


@pytest.mark.parametrize("body", [[], [{"choices": []}], "text", 7, True, {}])
@pytest.mark.parametrize("format", [CHAT, RESPONSES, ANTHROPIC, GEMINI, UNKNOWN])
def test_json_that_says_nothing_counts_for_nothing(format: str, body: object) -> None:
    assert analyse(format, "", json.dumps(body)) == (0, False)


@pytest.mark.parametrize("word", ["reasoning", "thinking", "tool", "function_call", "Thinking"])
@pytest.mark.parametrize("format", [CHAT, RESPONSES, ANTHROPIC, GEMINI, UNKNOWN])
def test_a_word_in_type_or_event_name_protects_in_every_format(format: str, word: str) -> None:
    assert analyse(format, f"x.{word}.y", '{"delta": "abc"}') == (0, True)
    assert analyse(format, "", json.dumps({"type": f"a_{word}_b", "delta": "abc"})) == (0, True)
    assert analyse(format, word, '{"type": "message_delta"}') == (0, True)


@pytest.mark.parametrize(
    ("text", "size"), [("abc", 3), ("é", 2), ("€", 3), ("😀", 4), ("\ud83d", 3), ("a" * 70_000, 70_000)]
)
def test_output_is_measured_in_bytes_of_utf8(text: str, size: int) -> None:
    assert analyse(CHAT, "", json.dumps(chat(content=text))) == (size, False)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (chat(content="ab", refusal="c"), (3, False)),
        ({"choices": [{"text": "abcd"}]}, (4, False)),
        ({"choices": [{"text": "a", "delta": {"content": "b"}}, {"delta": {"content": "cd"}}]}, (4, False)),
        (chat(content=[{"text": "ab"}, {"type": "text", "text": "c"}, {"text": 5}, "d"]), (3, False)),
        (chat(content=[{"type": "thinking", "text": "ab"}]), (0, True)),
        (chat(content=[{"type": 5, "text": "ab"}]), (2, False)),
        (chat(content="a", function_call={"name": "f"}), (0, True)),
        (chat(content="a", reasoning="hm"), (0, True)),
        (chat(content="a", reasoning_content="hm"), (0, True)),
        (chat(content="a", tool_calls=[{}]), (0, True)),
        (chat(content="a", function_call={}, reasoning="", reasoning_content=None, tool_calls=None), (1, False)),
        ({"choices": [{"delta": {"content": "a"}}, {"delta": {"reasoning": "b"}}]}, (0, True)),
        ({"choices": [None, 5, {"delta": None}, {"delta": [1]}, {"delta": {"content": 5, "refusal": {}}}]}, (0, False)),
        ({"choices": {"delta": {"content": "a"}}}, (0, False)),
        ({"delta": "abc"}, (0, False)),
        ({"choices": [], "usage": {"total_tokens": 1}}, (0, False)),
    ],
)
def test_chat_completions(body: object, found: tuple[int, bool]) -> None:
    assert analyse(CHAT, "", json.dumps(body)) == found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"type": "response.output_text.delta", "delta": "abc"}, (3, False)),
        ({"type": "response.refusal.delta", "delta": "no"}, (2, False)),
        ({"type": "response.new_kind.delta", "delta": "abcd"}, (4, False)),
        ({"delta": "abcd"}, (4, False)),
        ({"type": "response.output_text.done", "delta": "abc", "text": "abc"}, (0, False)),
        ({"type": "response.completed", "delta": "abc"}, (0, False)),
        ({"type": "response.web_search_call.searching"}, (0, True)),
        ({"type": "response.output_item.added", "item": {"type": "web_search_call"}}, (0, True)),
        ({"type": "response.output_item.added", "item": {"type": "reasoning"}}, (0, True)),
        ({"type": "response.output_item.added", "item": {"type": "message"}}, (0, False)),
        ({"type": "response.content_part.added", "part": {"type": "reasoning_text"}}, (0, True)),
        ({"type": "response.content_part.added", "part": {"type": "mcp_call"}}, (0, True)),
        ({"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}}, (0, False)),
        ({"type": "x", "item": "reasoning", "part": [], "delta": {"text": "abc"}}, (0, False)),
    ],
)
def test_responses(body: object, found: tuple[int, bool]) -> None:
    assert analyse(RESPONSES, "", json.dumps(body)) == found


def test_the_event_name_serves_where_the_data_has_no_type() -> None:
    assert analyse(RESPONSES, "response.mcp_call.progress", "{}") == (0, True)
    assert analyse(RESPONSES, "response.output_text.done", '{"delta": "abc"}') == (0, False)
    assert analyse(ANTHROPIC, "content_block_delta", '{"delta": {"type": "text_delta", "text": "abc"}}') == (3, False)
    assert analyse(RESPONSES, "response.mcp_call.progress", '{"type": "x", "delta": "abc"}') == (3, False)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"type": "content_block_start", "content_block": {"type": "text", "text": "ab"}}, (2, False)),
        ({"type": "content_block_start", "content_block": {"type": "redacted_thinking", "text": "x"}}, (0, True)),
        ({"type": "content_block_start", "content_block": {"type": "server_tool_use"}}, (0, True)),
        ({"type": "content_block_start", "content_block": {"type": "reasoning"}}, (0, True)),
        ({"type": "content_block_start", "content_block": {"type": "image", "text": "x"}}, (0, False)),
        ({"type": "content_block_start", "delta": {"type": "text_delta", "text": "x"}}, (0, False)),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "abc"}}, (3, False)),
        ({"type": "content_block_delta", "delta": {"type": "signature_delta", "text": "x"}}, (0, True)),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta"}}, (0, True)),
        ({"type": "content_block_delta", "delta": {"type": "input_json_delta"}}, (0, True)),
        ({"type": "content_block_delta", "delta": {"type": "citations_delta", "text": "x"}}, (0, False)),
        ({"type": "content_block_delta", "content_block": {"type": "text", "text": "x"}}, (0, False)),
        ({"type": "message_delta", "delta": {"type": "text_delta", "text": "x"}}, (0, False)),
        ({"type": "message_start", "message": {"content": "x"}}, (0, False)),
        ({"type": ["content_block_delta"], "delta": {"type": "text_delta", "text": "x"}}, (0, False)),
    ],
)
def test_anthropic(body: object, found: tuple[int, bool]) -> None:
    assert analyse(ANTHROPIC, "", json.dumps(body)) == found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (parts({"text": "ab"}, {"text": "c"}), (3, False)),
        (parts({"text": "ab", "thought": False}), (2, False)),
        (parts({"text": "ab"}, {"text": "c", "thought": True}), (0, True)),
        (parts({"functionCall": {}}), (0, True)),
        (parts({"functionResponse": {"a": 1}}), (0, True)),
        (parts({"executableCode": {"code": "x"}}), (0, True)),
        (parts({"codeExecutionResult": {"output": "x"}}), (0, True)),
        (parts({"inlineData": {"data": "x"}}), (0, True)),
        (parts({"text": "ab", "functionCall": None}), (2, False)),
        ({"response": parts({"text": "ab"})}, (2, False)),
        ({"response": {}, **parts({"text": "ab"})}, (2, False)),
        ({"candidates": [{"content": None}, {"content": {"parts": {"text": "x"}}}]}, (0, False)),
        ({"candidates": [{"content": {"parts": ["x"]}}]}, (0, False)),
        ({"candidates": [{"content": {"parts": [{"text": text}]}} for text in "ab"]}, (2, False)),
    ],
)  # fmt: skip
def test_gemini(body: object, found: tuple[int, bool]) -> None:
    assert analyse(GEMINI, "", json.dumps(body)) == found


@pytest.mark.parametrize("format", [UNKNOWN, "something else", ""])
def test_an_unknown_format_is_the_union_of_all(format: str) -> None:
    both = {**chat(content="ab"), **parts({"text": "c"}), "delta": "defg"}

    assert analyse(format, "", json.dumps(both)) == (7, False)
    assert analyse(format, "", json.dumps({**both, "item": {"type": "mcp_call"}})) == (0, True)
    assert analyse(format, "", json.dumps({**both, **chat(reasoning="x")})) == (0, True)
    assert analyse(format, "", json.dumps({**both, **parts({"thought": True})})) == (0, True)


def test_a_format_reads_its_own_table_alone() -> None:
    both = json.dumps({**chat(content="ab"), **parts({"text": "c"}), "delta": "defg"})

    assert [analyse(own, "", both)[0] for own in (CHAT, RESPONSES, ANTHROPIC, GEMINI)] == [2, 4, 0, 1]


# --- errors and the end

ERRORS = [
    (CHAT, "", {"error": {"message": "overloaded", "code": 503}}),
    (CHAT, "", {"choices": [{"delta": {"content": ""}, "finish_reason": "error", "error": {"code": 502}}]}),
    (RESPONSES, "error", {"type": "error", "code": "server_error", "message": "x"}),
    (RESPONSES, "response.failed", {"type": "response.failed", "response": {"error": {"code": "server_error"}}}),
    (ANTHROPIC, "error", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
    (GEMINI, "", {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "quota"}}),
    (UNKNOWN, "error", "the upstream went away"),
    (UNKNOWN, "error", {"reason": "the upstream went away"}),
]


@pytest.mark.parametrize(("format", "name", "body"), ERRORS)
def test_an_error_event_is_told_and_its_body_is_one_for_the_report(format: str, name: str, body: object) -> None:
    event = StreamEvent(name, body if isinstance(body, str) else json.dumps(body))
    told = read_event(format, event)
    outcome = parse_outcome(RawOutcome(status=200, body=error_body(event)))

    assert (told.is_error, told.useful_bytes, told.protected) == (True, 0, False)
    assert outcome.status is not None
    assert outcome.status >= 400


@pytest.mark.parametrize(
    "body",
    [
        chat(content="error: not one"),
        {**chat(content="a"), "error": None},
        {**chat(content="a"), "error": ""},
        {**chat(content="a"), "error": {}, "Error": {}},
        {"type": "response.incomplete", "response": {"error": {"code": "x"}}},
        {"type": "message_start", "message": {"error": "x"}},
        {"choices": []},
        "[DONE]",
        "",
    ],
)
@pytest.mark.parametrize("format", [CHAT, RESPONSES, ANTHROPIC, GEMINI, UNKNOWN])
def test_output_and_metadata_are_no_errors(format: str, body: object) -> None:
    assert not reading(format, body).is_error


def test_the_first_choice_alone_carries_an_error_and_an_empty_one_is_none() -> None:
    failed = {"error": {"code": 502}}

    assert carries_error({"choices": [failed, {}]})
    assert not carries_error({"choices": [{}, failed]})
    assert not carries_error({"choices": [{"error": {}}]})
    assert not carries_error({"choices": [{"error": "x"}]})


def test_a_reading_says_nothing_unless_told() -> None:
    assert EventReading() == (0, False, False, False)


def test_an_error_by_its_capitalised_name_counts() -> None:
    assert carries_error({"error": None, "Error": {"Code": "Throttling"}})
    assert not carries_error({"error": {}, "Error": {"Code": "Throttling"}})


def test_a_text_error_keeps_its_event_name_in_the_body() -> None:
    assert error_body(StreamEvent("error", "gone")) == "event: error\ndata: gone\n\n"
    assert error_body(StreamEvent("error", '{"error": "x"}')) == '{"error": "x"}'


@pytest.mark.parametrize(
    ("format", "name", "body", "is_end"),
    [
        (CHAT, "", "[DONE]", True),
        (CHAT, "", " [DONE]\r", True),
        (CHAT, "", {"choices": [{"delta": {}, "finish_reason": "stop"}]}, True),
        (CHAT, "", {"choices": [{"finish_reason": "stop"}, {"finish_reason": None}]}, False),
        (CHAT, "", chat(content="a"), False),
        (CHAT, "", {"choices": []}, False),
        (RESPONSES, "", {"type": "response.completed"}, True),
        (RESPONSES, "", {"type": "response.incomplete"}, True),
        (RESPONSES, "", {"type": "response.failed"}, True),
        (RESPONSES, "response.completed", {}, True),
        (RESPONSES, "", {"type": "response.output_text.done"}, False),
        (ANTHROPIC, "", {"type": "message_stop"}, True),
        (ANTHROPIC, "message_stop", "", True),
        (ANTHROPIC, "", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, False),
        (GEMINI, "", {"candidates": [{"finishReason": "STOP"}]}, True),
        (GEMINI, "", {"response": {"candidates": [{"finishReason": "STOP"}]}}, True),
        (GEMINI, "", parts({"text": "a"}), False),
        (UNKNOWN, "", {"type": ["message_stop"], "choices": 5, "candidates": "x"}, False),
    ],
)
def test_the_event_that_completes_an_answer_is_told(format: str, name: str, body: object, is_end: bool) -> None:
    assert reading(format, body, name).is_end is is_end
