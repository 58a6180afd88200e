"""langchain's ChatOllama in agents, by Ollama's own API."""

import ollama
from client_checks import (
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
from client_models import Forecast
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_ollama import ChatOllama

check = Checks("ollama")


def make(name=MODEL, most=200):
    headers = {"Authorization": f"Bearer {KEY}"}
    return ChatOllama(model=name, base_url=URL, client_kwargs={"headers": headers, "timeout": 120}, num_predict=most)


def agent():
    return create_agent(make(), tools=[get_weather, get_time], system_prompt=SYSTEM)


def asked(text):
    return {"messages": [{"role": "user", "content": text}]}


@check
def plain():
    answer = make(most=16).invoke([("system", SYSTEM), ("user", "Say hello.")])
    assert answer.text
    assert 0 < answer.usage_metadata["output_tokens"] <= 16


@check
def streaming():
    pieces = [chunk.text for chunk in make(most=16).stream("Say hello.")]
    assert len([piece for piece in pieces if piece]) > 3, pieces


@check
def tool():
    check_answer(agent().invoke(asked(ONE_CALL))["messages"][-1].text, "get_weather")


@check
def parallel():
    messages = agent().invoke(asked(TWO_CALLS))["messages"]
    assert len(messages[1].tool_calls) == 2, messages
    check_answer(messages[-1].text, "get_weather", "get_time")


@check
def streamed_tool():
    pieces = [
        chunk.text
        for chunk, about in agent().stream(asked(TWO_CALLS), stream_mode="messages")
        if isinstance(chunk, AIMessageChunk)
    ]
    check_answer("".join(pieces), "get_weather", "get_time")


check.cannot("required", "a request has no way to force a call")


@check
def structured():
    check_forecast(make().with_structured_output(Forecast, method="json_schema").invoke(QUESTION).model_dump())


@check
def error():
    unknown = raised(lambda: make(UNKNOWN).invoke("Hello"), ollama.ResponseError)
    assert unknown.status_code == 404, unknown
