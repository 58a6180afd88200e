"""smolagents: its OpenAI model, alone and in a ToolCallingAgent."""

import json

import openai
from client_checks import (
    FORECAST_SCHEMA,
    KEY,
    MODEL,
    ONE_CALL,
    QUESTION,
    TWO_CALLS,
    UNKNOWN,
    V1,
    Checks,
    check_answer,
    check_forecast,
    get_time,
    get_weather,
    raised,
)
from smolagents import ChatMessage, OpenAIModel, Tool, ToolCallingAgent
from smolagents import tool as as_tool
from smolagents.monitoring import LogLevel

check = Checks("chat")


def make(name=MODEL, most=200):
    return OpenAIModel(
        model_id=name, api_base=V1, api_key=KEY, client_kwargs={"max_retries": 0, "timeout": 120}, max_tokens=most
    )


def said(text):
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def agent(streamed=False):
    return ToolCallingAgent(
        tools=[as_tool(get_weather), as_tool(get_time)],
        model=make(most=400),
        max_steps=4,
        stream_outputs=streamed,
        verbosity_level=LogLevel.OFF,
    )


@check
def plain():
    answer = make(most=16).generate(said("Say hello."))
    assert answer.content
    assert answer.token_usage.output_tokens <= 16


@check
def streaming():
    pieces = list(make(most=16).generate_stream(said("Say hello.")))
    assert len([piece for piece in pieces if piece.content]) > 3, pieces
    assert pieces[-1].token_usage.output_tokens <= 16


@check
def tool():
    check_answer(agent().run(ONE_CALL), "get_weather")


@check
def parallel():
    answer = agent().run(TWO_CALLS)
    check_answer(answer, "get_weather", "get_time")


@check
def streamed_tool():
    steps = list(agent(streamed=True).run(ONE_CALL, stream=True))
    check_answer(steps[-1].output, "get_weather")


class ForecastTool(Tool):
    name = "forecast"
    description = "Keeps a forecast."
    inputs = {  # noqa: RUF012
        "city": {"type": "string", "description": "The city.", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "description": "How many days.", "minimum": 1, "maximum": 9},
        "summary": {"type": "string", "description": "In short.", "maxLength": 40},
    }
    output_type = "string"

    def forward(self, city: str, days: int, summary: str) -> str:
        return "kept"


@check
def required():
    answer = make().generate(said(QUESTION), tools_to_call_from=[ForecastTool()])
    (call, *_) = answer.tool_calls
    arguments = call.function.arguments
    check_forecast(json.loads(arguments) if isinstance(arguments, str) else arguments)


@check
def structured():
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": FORECAST_SCHEMA, "strict": True}}
    check_forecast(json.loads(make().generate(said(QUESTION), response_format=form).content))


@check
def error():
    raised(lambda: make(UNKNOWN).generate(said("Hello")), openai.NotFoundError)
