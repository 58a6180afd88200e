"""litellm: chat, responses, and its bridge from Anthropic's API to OpenAI's."""

import json

import litellm
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
    V1,
    WEATHER_SCHEMA,
    Checks,
    check_answer,
    check_forecast,
    get_time,
    get_weather,
    raised,
)
from client_models import Forecast

FUNCTIONS = {"get_weather": get_weather, "get_time": get_time}
SCHEMAS = {"get_weather": WEATHER_SCHEMA, "get_time": TIME_SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FORECAST_TOOL = {"type": "function", "function": {"name": "forecast", "parameters": FORECAST_SCHEMA, "strict": True}}
SERVER = {"api_base": V1, "api_key": KEY, "num_retries": 0, "timeout": 120}
chat = Checks("chat")


def ask(messages, model=MODEL, **options):
    return litellm.completion(model=f"openai/{model}", messages=messages, **SERVER, **options)


def said(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def run(text, answer):
    """Call tools until the model answers in words; return these."""
    messages = said(text)
    for _ in range(4):
        message = answer(messages)
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no answer after four turns")


def whole(messages):
    return ask(messages, tools=TOOLS).choices[0].message


def streamed(messages):
    chunks = list(ask(messages, tools=TOOLS, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message


@chat
def plain():
    answer = ask(said("Say hello."), max_tokens=16)
    assert answer.choices[0].message.content
    assert 0 < answer.usage.completion_tokens <= 16


@chat
def streaming():
    chunks = list(ask(said("Say hello."), max_tokens=16, stream=True, stream_options={"include_usage": True}))
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 3
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens <= 16


@chat
def tool():
    check_answer(run(ONE_CALL, whole), "get_weather")


@chat
def parallel():
    check_answer(run(TWO_CALLS, whole), "get_weather", "get_time")


@chat
def streamed_tool():
    check_answer(run(TWO_CALLS, streamed), "get_weather", "get_time")


@chat
def required():
    answer = ask(said(QUESTION), tools=[FORECAST_TOOL], tool_choice="required", max_tokens=200)
    check_forecast(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))


@chat
def structured():
    answer = ask(said(QUESTION), response_format=Forecast, max_tokens=200)
    check_forecast(json.loads(answer.choices[0].message.content))


@chat
def error():
    raised(lambda: ask(said("Hello"), model=UNKNOWN), litellm.NotFoundError)


bridge = Checks("messages to responses")
BLOCK_TOOLS = [{"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


def ask_bridge(messages, most=200, **options):
    return litellm.anthropic.messages.create(
        model=f"openai/{MODEL}", messages=messages, max_tokens=most, api_base=V1, api_key=KEY, **options
    )


@bridge
def plain():  # noqa: F811
    answer = ask_bridge([{"role": "user", "content": "Say hello."}], 16)
    assert answer["content"][0]["text"], answer


@bridge
def parallel():  # noqa: F811
    messages = [{"role": "user", "content": TWO_CALLS}]
    answer = ask_bridge(messages, tools=BLOCK_TOOLS)
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": FUNCTIONS[call["name"]](**call["input"])}
        for call in calls
    ]
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    after = ask_bridge(messages, tools=BLOCK_TOOLS)
    check_answer(after["content"][0]["text"], "get_weather", "get_time")


for name in ("streaming", "tool", "streamed_tool", "required", "structured", "error"):
    bridge.cannot(name, "not tried: the bridge is another way to the same requests")
