"""ollama for Python: chat, generate and the lists, by Ollama's own API."""

import json

import ollama
from client_checks import (
    FORECAST_SCHEMA,
    KEY,
    MODEL,
    ONE_CALL,
    QUESTION,
    SYSTEM,
    TWO_CALLS,
    UNKNOWN,
    URL,
    Checks,
    check_answer,
    check_forecast,
    get_time,
    get_weather,
    raised,
)

FUNCTIONS = {"get_weather": get_weather, "get_time": get_time}
client = ollama.Client(host=URL, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
check = Checks("ollama")


def said(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def run(text, streamed=False):
    """Call tools until the model answers in words; return these."""
    messages = said(text)
    for _ in range(4):
        answer = client.chat(MODEL, messages, tools=[get_weather, get_time], stream=streamed)
        parts = [part.message for part in (answer if streamed else [answer])]
        calls = [call for part in parts for call in part.tool_calls or ()]
        if not calls:
            return "".join(part.content or "" for part in parts)
        messages.append(ollama.Message(role="assistant", tool_calls=calls))
        for call in calls:
            result = FUNCTIONS[call.function.name](**call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    raise AssertionError("no answer after four turns")


@check
def plain():
    answer = client.chat(MODEL, said("Say hello."), options={"num_predict": 16}, keep_alive=-1)
    assert answer.message.content
    assert 0 < answer.eval_count <= 16
    assert any(model.model.startswith(MODEL) for model in client.list().models)
    assert "tools" in client.show(MODEL).capabilities
    assert client.ps().models
    assert client.generate(MODEL, "Say hello.", options={"num_predict": 16}).response


@check
def streaming():
    options = {"num_predict": 16, "temperature": 0}
    parts = list(client.chat(MODEL, said("Say hello."), options=options, stream=True))
    text = "".join(part.message.content for part in parts)
    assert text == client.chat(MODEL, said("Say hello."), options=options).message.content
    assert len(parts) > 5, "few parts"
    assert parts[-1].done


@check
def tool():
    check_answer(run(ONE_CALL), "get_weather")


@check
def parallel():
    check_answer(run(TWO_CALLS), "get_weather", "get_time")


@check
def streamed_tool():
    check_answer(run(TWO_CALLS, streamed=True), "get_weather", "get_time")


check.cannot("required", "a request has no way to force a call")


@check
def structured():
    answer = client.chat(MODEL, said(QUESTION), format=FORECAST_SCHEMA, options={"num_predict": 200})
    check_forecast(json.loads(answer.message.content))


@check
def error():
    unknown = raised(lambda: client.chat(UNKNOWN, said("Hello")), ollama.ResponseError)
    assert unknown.status_code == 404, unknown
    assert UNKNOWN in unknown.error
