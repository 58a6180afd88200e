"""Ollama's dialect: names, requests as the template and the engine get them, and lines of answers."""

import json
from typing import Any

import pytest

from moeserve.frontend.dialects import chat, ollama, ollama_models
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    ToolCallPart,
    Usage,
)
from moeserve.frontend.errors import ApiError, internal_error
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import SamplingParams
from tests.support.refusals import refused
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {"temperature": 0.6}, 20)
HELLO = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USAGE = Usage(prompt_tokens=9, completion_tokens=7)


def parse(**fields: Any) -> GenerateRequest:
    return ollama.parse_chat(json.dumps({"model": "tiny", "messages": [HELLO], **fields}).encode(), FACTS)


def generate(**fields: Any) -> GenerateRequest:
    return ollama.parse_generate(json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode(), FACTS)


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def lines(kind: type[ollama.ChatLines | ollama.TextLines]) -> Any:
    """A formatter whose clock gains 5 ns at each look."""
    request = GenerateRequest(
        model="m", prompts=[""], sampling=SamplingParams(max_tokens=0), max_tokens=7, seed=None, stream=True
    )
    times = iter(range(0, 100, 5))
    return kind("ollama-1", 17, request, TextTokenizer(byte_tokenizer()), "fp", clock=lambda: next(times))


def read(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize(
    ("file", "level"),
    [
        ("x/Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("owner/name:UD-IQ2_XXS", "IQ2_XXS"),
        ("gpt-oss-mxfp4.gguf", "MXFP4"),
        ("Q8_0/folder", ""),
    ],
)
def test_the_name_of_a_file_tells_its_quantisation(file: str, level: str) -> None:
    assert ollama_models.level_of(file) == level


@pytest.mark.parametrize(("names", "asked"), [(("m",), "m:latest"), (("m:latest",), "m"), (("m:q4", "m"), "m")])
def test_latest_is_taken_and_left_out(names: tuple[str, ...], asked: str) -> None:
    assert ollama.served_name(asked, names) in (names[-1], asked)
    with refused("model_not_found", "model", "m:other"):
        ollama.served_name("m:other", names)
    assert ollama.served_name(None, names) == names[0]
    assert ollama.served_name("m:other", names, takes_any=True) == "m:other"


def test_the_same_conversation_through_chat_gives_the_same_request() -> None:
    body = {"model": "tiny", "messages": [HELLO], "tools": TOOLS, "stream": True, "temperature": 0.5, "stop": ["x"]}
    body |= {"max_tokens": 4, "seed": 3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
    body |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    renamed = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
    options = {
        renamed.get(name, name): body[name] for name in body if name not in ("model", "messages", "tools", "stream")
    }
    assert parse(tools=TOOLS, options=options) == chat.parse(json.dumps(body).encode(), FACTS)


def test_a_stream_is_the_default() -> None:
    assert parse().stream
    assert not parse(stream=False).stream


def test_options_of_the_servers_hardware_are_passed_over_and_counted() -> None:
    request = parse(options={"num_ctx": 8192, "num_gpu": 99, "num_predict": -1, "seed": -1, "top_k": None})
    assert request.ignored == ("options.num_ctx", "options.num_gpu")
    assert (request.max_tokens, request.seed) == (None, None)
    assert parse(options=None).ignored == ()


@pytest.mark.parametrize(
    ("options", "word"),
    [({"temperature": 9}, "temperature"), ({"num_predict": "x"}, "num_predict"), ({"mirostat": 2}, "mirostat")],
)
def test_an_option_that_cannot_be_served_is_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ApiError, match=word):
        parse(options=options)


def test_results_without_ids_answer_the_calls_of_their_names_in_order() -> None:
    asks = {
        "role": "assistant",
        "tool_calls": [call("clock"), call("weather", city="Rome"), call("weather", city="Oslo")],
    }
    results = [
        {"role": "tool", "tool_name": name, "content": text} for name, text in (("weather", "1"), ("weather", "2"))
    ]
    said = prompt_of(parse(messages=[HELLO, asks, *results, {"role": "tool", "content": "3"}])).messages
    clock, rome, oslo = (made["id"] for made in said[1]["tool_calls"])
    assert len({clock, rome, oslo}) == 3
    assert [message["tool_call_id"] for message in said[2:]] == [rome, oslo, clock]
    assert [message["name"] for message in said[2:]] == ["weather", "weather", "clock"]
    assert said[1]["tool_calls"][1]["function"]["arguments"] == {"city": "Rome"}


def test_thoughts_of_earlier_turns_are_kept() -> None:
    said = prompt_of(parse(messages=[HELLO, {"role": "assistant", "content": "a", "thinking": "hm"}, HELLO])).messages
    assert said[1]["reasoning_content"] == "hm"


def test_an_image_is_refused_from_a_user_and_left_out_of_a_tools_result() -> None:
    with refused("unsupported_parameter", "messages[0].images"):
        parse(messages=[{**HELLO, "images": ["aGk="]}])
    said = prompt_of(parse(messages=[HELLO, {"role": "tool", "content": "seen", "images": ["aGk="]}])).messages
    assert said[1]["content"] == "seen\n[image left out: this model reads text]"


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (None, {}),
        (True, {"enable_thinking": True, "thinking": True}),
        (False, {"enable_thinking": False, "thinking": False}),
        ("low", {"reasoning_effort": "low"}),
    ],
)
def test_think_sets_the_variables_of_templates(think: Any, variables: dict[str, Any]) -> None:
    for prompt in (prompt_of(parse(think=think)), prompt_of(generate(think=think))):
        assert prompt.variables == variables
        assert prompt.switches == ({"think": tuple(variables)} if variables else {})


def test_format_asks_for_json_or_for_a_schema() -> None:
    assert parse(format="json").output_format == OutputFormat("json_object", None, "format")
    schema = {"type": "object"}
    assert generate(format=schema, raw=True).output_format == OutputFormat("json_schema", schema, "format")
    assert parse(format="").output_format is None
    with refused("invalid_value", "format"):
        parse(format="xml")


def test_a_prompt_is_a_chat_unless_it_is_raw() -> None:
    assert prompt_of(generate(system="s")).messages == [{"role": "system", "content": "s"}, HELLO]
    request = generate(raw=True, options={"num_predict": 3})
    assert (request.prompts, request.max_tokens) == (["hi"], 3)
    assert generate(raw=True, think=True).ignored == ("think",)


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"template": "x"}, {"images": ["x"]}, {"context": [1]}, {"raw": True, "system": "s"}]
)
def test_what_would_change_the_prompt_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=list(fields)[-1]):
        generate(**fields)


@pytest.mark.parametrize(
    ("keep_alive", "unloads"), [(None, False), (-1, False), ("5m", False), (0, True), ("0", True), ("0s", True)]
)
def test_a_body_that_asks_for_no_answer_wishes_that_the_model_is_loaded_or_not(keep_alive: Any, unloads: bool) -> None:
    for kind in (ollama.OllamaChatBody, ollama.OllamaGenerateBody):
        body = json.dumps({"model": "tiny:latest", "keep_alive": keep_alive}).encode()
        wish = ollama.read_load(body, kind, ("tiny",))
        assert wish == ollama.LoadWish("tiny", unloads)
        assert wish.answer(kind, 17)["done_reason"] == ("unload" if unloads else "load")
    assert ollama.read_load(b'{"model":"tiny","prompt":"hi"}', ollama.OllamaGenerateBody, ("tiny",)) is None


def test_lines_of_a_chat_end_with_counts_and_nanoseconds() -> None:
    writer = lines(ollama.ChatLines)
    found = read(
        writer.delta(Delta(0, reasoning="hm"), USAGE)
        + writer.delta(Delta(0, text="yes"), USAGE)
        + writer.ping()
        + writer.resumed()
        + writer.delta(Delta(0, finish_reason="length"), USAGE)
        + writer.end(USAGE)
    )
    head = {"model": "m", "created_at": "1970-01-01T00:00:17Z"}
    assert found[0] == {**head, "message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False}
    assert [line["message"]["content"] for line in found] == ["", "yes", "", ""]
    assert found[-1] == {
        **head,
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "length",
        "total_duration": 10,
        "load_duration": 0,
        "prompt_eval_count": 9,
        "prompt_eval_duration": 5,
        "eval_count": 7,
        "eval_duration": 5,
    }


def test_a_call_that_came_in_pieces_is_one_object() -> None:
    writer = lines(ollama.ChatLines)
    pieces = [ToolCallPart(0, '{"city":', "call_1", "weather"), ToolCallPart(0, '"Rome"}')]
    assert b"".join(writer.delta(Delta(0, calls=[piece]), USAGE) for piece in pieces) == b""
    first, last = read(writer.delta(Delta(0, finish_reason="tool_calls"), USAGE) + writer.end(USAGE))
    made = {"id": "call_1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}}
    assert first["message"]["tool_calls"] == [made]
    assert last["done_reason"] == "stop"


def test_a_whole_text_says_what_its_lines_say() -> None:
    writer = lines(ollama.TextLines)
    whole = answer_of(writer.complete([Delta(0, text="yes", reasoning="hm", finish_reason="stop")], USAGE))
    assert (whole["response"], whole["thinking"], whole["done_reason"]) == ("yes", "hm", "stop")
    assert whole["eval_duration"] == whole["total_duration"]
    assert read(writer.delta(Delta(0, text="yes"), USAGE))[0]["response"] == "yes"


def test_an_error_is_a_line_with_a_sentence() -> None:
    assert read(lines(ollama.TextLines).error(internal_error("oh"))) == [{"error": "oh"}]
