"""anthropic for Python: messages."""

import json

import anthropic
from anthropic import Anthropic
from client_checks import (
    FORECAST_SCHEMA,
    KEY,
    MODEL,
    ONE_CALL,
    QUESTION,
    SYSTEM,
    TIME_SCHEMA,
    TWO_CALLS,
    UNKNOWN,
    URL,
    WEATHER_SCHEMA,
    Checks,
    check_answer,
    check_forecast,
    get_time,
    get_weather,
    raised,
)

FUNCTIONS = {"get_weather": get_weather, "get_time": get_time}
client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
check = Checks("messages")
TOOLS = [
    {"name": "get_weather", "description": "Return the weather in a city.", "input_schema": WEATHER_SCHEMA},
    {"name": "get_time", "description": "Return the time in a zone.", "input_schema": TIME_SCHEMA},
]
FORECAST_TOOL = {"name": "forecast", "description": "Keep a forecast.", "input_schema": FORECAST_SCHEMA}
ASK = {"model": MODEL, "max_tokens": 200, "system": SYSTEM}


def said(text):
    return [{"role": "user", "content": text}]


def run(text, ask):
    """Call tools until the model answers in words; return these."""
    messages = said(text)
    for _ in range(4):
        answer = ask(messages)
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == ("tool_use" if calls else "end_turn"), answer
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": [{"type": "text", "text": FUNCTIONS[call.name](**call.input)}],
            }
            for call in calls
        ]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    raise AssertionError("no answer after four turns")


def ask_streamed(messages):
    pieces = []
    with client.messages.stream(**ASK, messages=messages, tools=TOOLS) as events:
        for event in events:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                pieces.append(event.delta.partial_json)
        answer = events.get_final_message()
    if calls := [block for block in answer.content if block.type == "tool_use"]:
        assert "".join(pieces) == "".join(json.dumps(call.input) for call in calls), pieces
        assert len(pieces) > len(calls), "inputs came in one piece"
    return answer


@check
def plain():
    message = client.messages.create(model=MODEL, max_tokens=16, system=SYSTEM, messages=said("Say hello."))
    assert message.content[0].type == "text"
    assert 0 < message.usage.output_tokens <= 16
    assert message._request_id
    assert MODEL in [entry.id for entry in client.models.list()]
    assert client.models.retrieve(MODEL).type == "model"
    cached = {"type": "text", "text": "You know every city. " * 20, "cache_control": {"type": "ephemeral"}}
    options = {"model": MODEL, "system": [cached], "messages": said("Say hello.")}
    client.messages.create(**options, max_tokens=4)
    usage = client.messages.create(**options, max_tokens=4).usage
    assert usage.cache_read_input_tokens > 0, usage
    counted = client.messages.count_tokens(**options).input_tokens
    assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == counted, usage


@check
def streaming():
    options = {"model": MODEL, "max_tokens": 16, "messages": said("Say hello."), "extra_body": {"temperature": 0}}
    with client.messages.stream(**options) as events:
        pieces = list(events.text_stream)
        streamed = events.get_final_message()
    assert len(pieces) > 3, pieces
    assert streamed.content[0].text == "".join(pieces) == client.messages.create(**options).content[0].text
    assert streamed.usage.output_tokens > 0


@check
def tool():
    check_answer(run(ONE_CALL, lambda turns: client.messages.create(**ASK, messages=turns, tools=TOOLS)), "get_weather")


@check
def parallel():
    text = run(TWO_CALLS, lambda turns: client.messages.create(**ASK, messages=turns, tools=TOOLS))
    check_answer(text, "get_weather", "get_time")


@check
def streamed_tool():
    check_answer(run(TWO_CALLS, ask_streamed), "get_weather", "get_time")


@check
def required():
    for way in ({"type": "any"}, {"type": "tool", "name": "forecast"}):
        # The demo would call until the answer is cut.
        choice = way | {"disable_parallel_tool_use": True}
        answer = client.messages.create(**ASK, messages=said(QUESTION), tools=[FORECAST_TOOL], tool_choice=choice)
        assert answer.stop_reason == "tool_use", answer
        check_forecast(next(block for block in answer.content if block.type == "tool_use").input)


@check
def structured():
    form = {"format": {"type": "json_schema", "schema": FORECAST_SCHEMA}}
    answer = client.messages.create(**ASK, messages=said(QUESTION), output_config=form)
    check_forecast(json.loads(answer.content[-1].text))


@check
def error():
    unknown = raised(
        lambda: client.messages.create(model=UNKNOWN, max_tokens=1, messages=said("Hello")), anthropic.NotFoundError
    )
    assert unknown.body["error"]["type"] == "not_found_error", unknown.body
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused = raised(
        lambda: client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": [image]}]),
        anthropic.BadRequestError,
    )
    assert "image" in refused.message, refused.message
