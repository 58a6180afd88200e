"""openai for Python: chat completions and responses."""

import json

import openai
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
from openai import OpenAI

FUNCTIONS = {"get_weather": get_weather, "get_time": get_time}
SCHEMAS = {"get_weather": WEATHER_SCHEMA, "get_time": TIME_SCHEMA}
client = OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=120)
chat = Checks("chat")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
FORECAST_TOOL = {"type": "function", "function": {"name": "forecast", "parameters": FORECAST_SCHEMA, "strict": True}}


def said(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def run_chat(text, ask):
    """Call tools until the model answers in words; return these."""
    messages = said(text)
    for _ in range(4):
        message = ask(messages)
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no answer after four turns")


def ask_chat(messages):
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop"), answer
    return choice.message


def ask_chat_streamed(messages):
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        message = stream.get_final_completion().choices[0].message
    assert not message.tool_calls or len(pieces) > len(message.tool_calls), "arguments came in one piece"
    return message


@chat
def plain():
    answer = client.chat.completions.create(model=MODEL, messages=said("Say hello."), max_completion_tokens=16)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id
    assert MODEL in [model.id for model in client.models.list()]


@chat
def streaming():
    options = {"model": MODEL, "messages": said("Say hello."), "max_tokens": 16, "temperature": 0}
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == client.chat.completions.create(**options).choices[0].message.content
    assert len(chunks) > 5, "few chunks"
    assert chunks[-1].usage.completion_tokens <= 16


@chat
def tool():
    check_answer(run_chat(ONE_CALL, ask_chat), "get_weather")


@chat
def parallel():
    check_answer(run_chat(TWO_CALLS, ask_chat), "get_weather", "get_time")


@chat
def streamed_tool():
    check_answer(run_chat(TWO_CALLS, ask_chat_streamed), "get_weather", "get_time")


@chat
def required():
    for choice in ("required", {"type": "function", "function": {"name": "forecast"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=said(QUESTION), tools=[FORECAST_TOOL], tool_choice=choice, max_tokens=100
        )
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "forecast"
        check_forecast(json.loads(call.function.arguments))


@chat
def structured():
    answer = client.chat.completions.parse(
        model=MODEL, messages=said(QUESTION), response_format=Forecast, max_tokens=200
    )
    check_forecast(answer.choices[0].message.parsed.model_dump())


@chat
def error():
    unknown = raised(
        lambda: client.chat.completions.create(model=UNKNOWN, messages=said("Hello")), openai.NotFoundError
    )
    assert unknown.code == "model_not_found", unknown
    raised(lambda: OpenAI(base_url=V1, api_key="wrong").models.list(), openai.AuthenticationError)
    bad = raised(
        lambda: client.chat.completions.create(model=MODEL, messages=said("Hello"), temperature=99),
        openai.BadRequestError,
    )
    assert bad.param == "temperature", bad


responses = Checks("responses")
FLAT_TOOLS = [
    {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
]
FLAT_FORECAST_TOOL = {"type": "function", "name": "forecast", "parameters": FORECAST_SCHEMA, "strict": True}


def run_responses(text, ask):
    """Call tools until the model answers in words; return these."""
    items = [{"role": "user", "content": text}]
    for _ in range(4):
        answer = ask(items)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += answer.output
        for call in calls:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise AssertionError("no answer after four turns")


def ask_responses(items):
    answer = client.responses.create(model=MODEL, instructions=SYSTEM, input=items, tools=FLAT_TOOLS, store=False)
    assert answer.status == "completed", answer
    return answer


def ask_responses_streamed(items):
    with client.responses.stream(model=MODEL, instructions=SYSTEM, input=items, tools=FLAT_TOOLS) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == sorted(set(numbers)), numbers
        return stream.get_final_response()


@responses
def plain():  # noqa: F811
    answer = client.responses.create(model=MODEL, instructions=SYSTEM, input="Say hello.", max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens <= 16
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    later = client.responses.create(
        model=MODEL, previous_response_id=answer.id, input="Say it again.", max_output_tokens=16
    )
    assert later.previous_response_id == answer.id
    assert client.responses.retrieve(later.id).output_text == later.output_text


@responses
def streaming():  # noqa: F811
    # An answer that was cut ends with response.incomplete, for which `responses.stream` has no final response.
    *events, last = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, stream=True)
    assert last.type in ("response.completed", "response.incomplete"), last
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == last.response.output_text
    assert len(pieces) > 3


@responses
def tool():  # noqa: F811
    check_answer(run_responses(ONE_CALL, ask_responses), "get_weather")


@responses
def parallel():  # noqa: F811
    check_answer(run_responses(TWO_CALLS, ask_responses), "get_weather", "get_time")


@responses
def streamed_tool():  # noqa: F811
    check_answer(run_responses(TWO_CALLS, ask_responses_streamed), "get_weather", "get_time")


@responses
def required():  # noqa: F811
    for choice in ("required", {"type": "function", "name": "forecast"}):
        answer = client.responses.create(
            model=MODEL, input=QUESTION, tools=[FLAT_FORECAST_TOOL], tool_choice=choice, max_output_tokens=200
        )
        call = next(item for item in answer.output if item.type == "function_call")
        check_forecast(json.loads(call.arguments))


@responses
def structured():  # noqa: F811
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Forecast, max_output_tokens=200)
    check_forecast(answer.output_parsed.model_dump())


@responses
def error():  # noqa: F811
    unknown = raised(lambda: client.responses.create(model=UNKNOWN, input="Hello"), openai.NotFoundError)
    assert unknown.code == "model_not_found", unknown
    raised(
        lambda: client.responses.create(model=MODEL, input="Hello", previous_response_id="resp_none"),
        (openai.NotFoundError, openai.BadRequestError),
    )
