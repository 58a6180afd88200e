"""Structured output over HTTP: a whole service with a tiny random model, whose every answer has to fit all the same."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.support.service import Service, descendants, is_alive, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import SPECIALS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), "--max-model-len", "4096") as started:
        yield started


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def chat(running: Service, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": "Describe a pet."}], "temperature": 1.5, **fields}
    return running.http.post("/v1/chat/completions", json=body)


def test_every_choice_of_an_answer_validates(running: Service) -> None:
    answer = chat(running, response_format=json_schema(PERSON), n=4, max_tokens=500, ignore_eos=True).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4
    assert len(set(texts)) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_a_stream_in_a_form_says_what_the_whole_answer_says(running: Service) -> None:
    asked = {"response_format": json_schema(PERSON), "seed": 5, "max_tokens": 500}
    whole = chat(running, **asked).json()["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in chat(running, stream=True, **asked).text.split("\n\n") if line]
    deltas = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    assert "".join(choice["delta"].get("content") or "" for choice in deltas) == whole
    assert deltas[-1]["finish_reason"] == "stop"


def test_completions_take_patterns_and_choices(running: Service) -> None:
    def text(**fields: Any) -> str:
        body = {"model": "m", "prompt": "hi", "temperature": 1.5, "max_tokens": 40, **fields}
        choice = running.http.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return str(choice["text"])

    assert re.fullmatch(r"[a-f]{3}-\d{2}", text(guided_regex=r"[a-f]{3}-\d{2}"))
    assert text(structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert text(guided_grammar='root ::= "x" [0-9] "y"')[::2] == "xy"
    # As other servers call them; the same form twice is one form.
    assert re.fullmatch(r"[a-f]{3}-\d{2}", text(regex=r"[a-f]{3}-\d{2}"), re.ASCII)
    assert text(ebnf='root ::= "x" [0-9] "y"')[::2] == "xy"
    assert 0 <= json.loads(text(json_schema=json.dumps({"type": "integer", "minimum": 0, "maximum": 9}))) <= 9
    lark = 'start: "left" | "right"'
    assert text(guided_grammar=lark, structured_outputs={"grammar": lark}) in ("left", "right")


def test_a_tag_in_the_text_holds_json_of_its_schema(running: Service) -> None:
    tags = {
        "type": "triggered_tags",
        "triggers": ["<"],
        "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    wanted = {"type": "structural_tag", "format": tags}
    # Toward the trigger: a random model would write for ever before it.
    bias = {str(ord("<")): 100.0}
    choice = chat(running, response_format=wanted, max_tokens=600, logit_bias=bias).json()["choices"][0]
    found = re.fullmatch("<f=a>(.*)</f>", choice["message"]["content"], re.DOTALL)
    assert found is not None
    jsonschema.validate(json.loads(found[1]), PERSON)


def test_a_stream_goes_on_beside_many_new_schemas(running: Service) -> None:
    """Other requests' grammars are compiled outside of its steps; each request ends with its own schema's answer."""
    body = {"model": "m", "prompt": "on", "max_tokens": 3000, "ignore_eos": True, "stream": True, "priority": -1}
    names = [[f"field_{number}_{place}" for place in range(100)] for number in range(64)]
    schemas = [{"type": "object", "properties": {name: {"const": 1} for name in own}, "required": own} for own in names]
    counts = []

    def ask(schema: Any) -> str:
        asked = chat(running, response_format=json_schema(schema), max_tokens=20, background=True)
        counts.append(num_tokens)
        return str(asked.json()["choices"][0]["message"]["content"])

    num_tokens = 0
    with running.http.stream("POST", "/v1/completions", json=body) as stream, ThreadPoolExecutor(64) as pool:
        events = stream.iter_lines()
        next(events)
        answers = pool.map(ask, schemas)
        for event in events:
            num_tokens += event.startswith("data: {")
            if len(counts) == len(schemas):
                break
        texts = list(answers)
    # The stream had tokens while schemas were compiled and answered, from the first to the last.
    assert max(counts) - min(counts) > 8
    for text, own in zip(texts, names, strict=True):
        whole = json.dumps(dict.fromkeys(own, 1), separators=(",", ":"))
        written = re.sub(r"\s", "", text)
        assert written.startswith("{")
        assert whole.startswith(written)


@pytest.mark.parametrize("text", SPECIALS)
def test_a_special_token_in_a_constant_is_text_that_ends_nothing(running: Service, text: str) -> None:
    said = f"a{text}b"
    schema = {"type": "object", "properties": {said: {"const": said}}, "required": [said]}
    for asked, content in [
        ({"structured_outputs": {"choice": [said]}}, said),
        ({"guided_regex": re.escape(said)}, said),
        ({"response_format": json_schema(schema)}, None),
    ]:
        choice = chat(running, **asked, logprobs=True, max_tokens=400).json()["choices"][0]
        written = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert written == content if content else json.loads(written) == {said: said}
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "".join(tokens[:-1]) == written
        assert set(tokens[:-1]).isdisjoint(SPECIALS)
    cut = chat(running, structured_outputs={"choice": [said]}, stop=[text]).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("a", "stop")


def test_a_special_token_in_a_forced_call_is_part_of_its_arguments(running: Service) -> None:
    value = "".join((*SPECIALS, "</tool_call>"))
    parameters = {"type": "object", "properties": {"k": {"const": value}}, "required": ["k"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    choice = chat(running, tools=tools, tool_choice="required", max_tokens=4000, parallel_tool_calls=False).json()
    (call,) = choice["choices"][0]["message"]["tool_calls"]
    assert choice["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"k": value}


def test_ids_of_64_bits_keep_their_digits(running: Service) -> None:
    number = 2512292042121000001
    bounds = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    properties = {"id": {"enum": [number]}, "any": bounds, "maybe": {"anyOf": [{"const": number + 2}]}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    text = chat(running, response_format=json_schema(schema), max_tokens=400).json()["choices"][0]["message"]["content"]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    called = chat(running, tools=tools, tool_choice="required", max_tokens=400, parallel_tool_calls=False).json()
    (call,) = called["choices"][0]["message"]["tool_calls"]
    for answer in (json.loads(text), json.loads(call["function"]["arguments"])):
        assert (answer["id"], answer["maybe"]) == (number, number + 2)
        jsonschema.validate(answer, schema)


def test_an_answer_that_is_cut_says_length(running: Service) -> None:
    choice = chat(running, response_format=json_schema(PERSON), max_tokens=4).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{")


def test_an_invalid_schema_is_refused_with_its_place(running: Service) -> None:
    bad = {"type": "object", "properties": {"age": {"type": "intger"}}}
    answer = chat(running, response_format=json_schema(bad), stream=True)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "response_format.json_schema.schema.properties.age.type"
    assert "intger" in error["message"]
    assert chat(running, max_tokens=1).status_code == 200


def test_a_grammar_that_dies_ends_its_request_alone(running: Service) -> None:
    ambiguous = {"guided_grammar": 'start: e\ne: e e | e e e | /[a-z]/ | ""', "min_tokens": 900, "max_tokens": 1000}
    answer = chat(running, **ambiguous)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_failed")
    assert chat(running, response_format=json_schema(PERSON), max_tokens=500).status_code == 200


def test_the_text_processes_end_with_the_frontend(tmp_path: Any) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    with service(model, tmp_path) as started:
        assert chat(started, response_format=json_schema(PERSON), max_tokens=1).status_code == 200
        # Two, and the one that starts them. The second one may be on its way.
        wait_until(lambda: len(descendants(started.pids["frontend"])) >= 3)
        processes = descendants(started.pids["frontend"])
        started.process.terminate()
        assert started.end() == 0
        for process in processes:
            wait_until(lambda process=process: not is_alive(process))
