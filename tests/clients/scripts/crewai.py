"""crewai: its LLM for servers like OpenAI's (chat, responses), alone and in an Agent."""

import os
from typing import Literal

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}

import openai
from client_checks import (
    KEY,
    MODEL,
    ONE_CALL,
    QUESTION,
    SYSTEM,
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
from client_models import Forecast
from crewai import LLM, Agent
from crewai.events import LLMStreamChunkEvent, crewai_event_bus
from crewai.tools import tool as as_tool

TOOLS = [as_tool("get_weather")(get_weather), as_tool("get_time")(get_time)]
pieces = []


@crewai_event_bus.on(LLMStreamChunkEvent)
def keep(_, event):
    pieces.append(event.chunk)


def run(api):
    check = Checks("chat" if api == "completions" else api)

    def make(name=MODEL, most=200, **options):
        limit = {"max_completion_tokens": most} if api == "completions" else {"max_tokens": most}
        server = {"base_url": V1, "api_key": KEY, "max_retries": 0, "timeout": 120}
        return LLM(model=name, custom_openai=True, api=api, **server, **limit, **options)

    def ask(text, **options):
        agent = Agent(role="Helper", goal=SYSTEM, backstory=SYSTEM, llm=make(**options), tools=TOOLS, max_iter=4)
        return agent.kickoff(text).raw

    @check
    def plain():
        assert make(most=16).call("Say hello.")

    @check
    def streaming():
        pieces.clear()
        text = make(most=16, stream=True).call("Say hello.")
        crewai_event_bus.flush()
        assert len(pieces) > 3, pieces
        assert "".join(pieces) == text

    @check
    def tool():
        check_answer(ask(ONE_CALL), "get_weather")

    @check
    def parallel():
        check_answer(ask(TWO_CALLS), "get_weather", "get_time")

    def streamed_tool():
        check_answer(ask(TWO_CALLS, stream=True), "get_weather", "get_time")

    if api == "completions":
        check(streamed_tool)
    else:
        check.cannot("streamed_tool", "it drops the calls of a streamed response that an agent asks for")

    def required():
        seen = []

        def forecast(city: Literal["Paris", "Rome"], days: int) -> str:
            seen.append((city, days))
            return "kept"

        parameters = {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        }
        function = {"name": "forecast", "description": "Keep a forecast.", "parameters": parameters}
        llm = make(additional_params={"tool_choice": "required"})
        llm.call(
            QUESTION, tools=[{"type": "function", "function": function}], available_functions={"forecast": forecast}
        )
        assert type(seen[0][1]) is int, seen

    if api == "responses":
        check(required)
    else:
        check.cannot("required", "it puts `auto` in the place of every `tool_choice`")

    @check
    def structured():
        answer = make(response_format=Forecast).call(QUESTION)
        check_forecast((answer if isinstance(answer, Forecast) else Forecast.model_validate_json(answer)).model_dump())

    @check
    def error():
        unknown = raised(lambda: make(UNKNOWN).call("Hello"), (openai.NotFoundError, ValueError))
        assert UNKNOWN in str(unknown), unknown


run("completions")
run("responses")
