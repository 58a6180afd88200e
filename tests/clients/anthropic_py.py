"""The anthropic package against a running service: `python anthropic_py.py URL KEY MODEL [CASE...]`.

Each case is a function; the script prints a line for each and ends with 1 if any failed. It needs no judgement of the
model: calls are forced, and the service holds them, and structured answers, to their schemas.
"""

from __future__ import annotations

import json
import sys
import traceback

import anthropic
from anthropic import Anthropic

WEATHER = {
    "name": "get_weather",
    "description": "Return the weather in a city.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def check_input(arguments: object) -> None:
    assert isinstance(arguments, dict), arguments
    assert arguments.keys() == {"city", "days"}, arguments
    assert isinstance(arguments["city"], str), arguments
    assert isinstance(arguments["days"], int), arguments


def plain(client: Anthropic, model: str) -> None:
    message = client.messages.create(model=model, max_tokens=16, system="Be brief.", messages=[QUESTION])
    assert message.id.startswith("msg_")
    assert (message.role, message.model, message.type) == ("assistant", model, "message")
    assert message.content[0].type == "text"
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 16
    assert message._request_id


def stream(client: Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=16, messages=[QUESTION]) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    assert message.content[0].text == text
    assert message.usage.output_tokens > 0


def stream_says_what_the_whole_says(client: Anthropic, model: str) -> None:
    fields = {"model": model, "max_tokens": 24, "messages": [QUESTION], "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        streamed = events.get_final_message()
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def cached_tokens(client: Anthropic, model: str) -> None:
    system = [{"type": "text", "text": "You know every city. " * 20, "cache_control": {"type": "ephemeral"}}]
    fields = {"model": model, "max_tokens": 4, "system": system, "messages": [QUESTION]}
    client.messages.create(**fields)
    usage = client.messages.create(**fields).usage
    assert usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(model=model, system=system, messages=[QUESTION]).input_tokens
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == counted


def tool(client: Anthropic, model: str) -> None:
    ask = {"model": model, "max_tokens": 200, "tools": [WEATHER]}
    message = client.messages.create(**ask, messages=[QUESTION], tool_choice={"type": "any"})
    assert message.stop_reason == "tool_use", message
    call = next(block for block in message.content if block.type == "tool_use")
    assert call.name == "get_weather"
    check_input(call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny"}]}
    turns = [QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**ask, messages=turns, tool_choice={"type": "none"})
    assert after.stop_reason in ("end_turn", "max_tokens"), after


def tool_streamed(client: Anthropic, model: str) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    pieces = []
    with client.messages.stream(
        model=model, max_tokens=200, messages=[QUESTION], tools=[WEATHER], tool_choice=choice
    ) as events:
        for event in events:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces.append(event.delta.partial_json)
        message = events.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    check_input(call.input)
    assert json.loads("".join(pieces)) == call.input
    assert message.stop_reason == "tool_use"


def structured_output(client: Anthropic, model: str) -> None:
    schema = WEATHER["input_schema"]
    message = client.messages.create(
        model=model,
        max_tokens=200,
        messages=[QUESTION],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    check_input(json.loads(message.content[-1].text))


def errors(client: Anthropic, model: str) -> None:
    unknown = refusal(client, model="nobody", messages=[QUESTION])
    assert isinstance(unknown, anthropic.NotFoundError), unknown
    assert unknown.body["error"]["type"] == "not_found_error", unknown.body
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused = refusal(client, model=model, messages=[{"role": "user", "content": [image]}])
    assert isinstance(refused, anthropic.BadRequestError), refused
    assert "messages[0].content[0].type=image" in refused.message, refused.message


def refusal(client: Anthropic, **fields: object) -> anthropic.APIStatusError:
    """Return the error that a request is refused with."""
    try:
        client.messages.create(max_tokens=1, **fields)
    except anthropic.APIStatusError as error:
        return error
    raise AssertionError("the request was served")


def models(client: Anthropic, model: str) -> None:
    assert model in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(model).type == "model"


CASES = (
    plain,
    stream,
    stream_says_what_the_whole_says,
    cached_tokens,
    tool,
    tool_streamed,
    structured_output,
    errors,
    models,
)


def main(url: str, key: str, model: str, *names: str) -> int:
    """Run the cases, all or those named; return how many failed."""
    failed = 0
    with Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120) as client:
        for case in CASES:
            if names and case.__name__ not in names:
                continue
            try:
                case(client, model)
            except Exception:
                failed += 1
                traceback.print_exc()
                print(f"FAILED {case.__name__}")
            else:
                print(f"ok     {case.__name__}")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(*sys.argv[1:]) else 0)
