"""agno: its OpenAI models (chat, responses) in an Agent."""

from typing import Literal

from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from agno.tools import tool as as_tool
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
)
from client_models import Forecast


def run(api):
    check = Checks(api)

    def make(name=MODEL, most=200, **options):
        server = {"id": name, "base_url": V1, "api_key": KEY, "max_retries": 0, "timeout": 120}
        if api == "chat":
            model = OpenAILike(**server, max_tokens=most, supports_native_structured_outputs=True)
        else:
            model = OpenAIResponses(**server, max_output_tokens=most)
        return Agent(model=model, instructions=SYSTEM, telemetry=False, **options)

    @check
    def plain():
        answer = make(most=16).run("Say hello.")
        assert answer.content
        assert 0 < answer.metrics.output_tokens <= 16

    @check
    def streaming():
        pieces = [event.content for event in make(most=16).run("Say hello.", stream=True) if event.content]
        assert len(pieces) > 3, pieces

    @check
    def tool():
        check_answer(make(tools=[get_weather, get_time]).run(ONE_CALL).content, "get_weather")

    @check
    def parallel():
        answer = make(tools=[get_weather, get_time]).run(TWO_CALLS)
        check_answer(answer.content, "get_weather", "get_time")

    @check
    def streamed_tool():
        events = make(tools=[get_weather, get_time]).run(TWO_CALLS, stream=True)
        text = "".join(event.content for event in events if event.event == "RunContent" and event.content)
        check_answer(text, "get_weather", "get_time")

    @check
    def required():
        seen = []

        @as_tool(stop_after_tool_call=True)
        def forecast(city: Literal["Paris", "Rome"], days: int) -> str:
            """Keep a forecast."""
            seen.append((city, days))
            return "kept"

        make(tools=[forecast], tool_choice="required").run(QUESTION)
        assert type(seen[0][1]) is int, seen

    @check
    def structured():
        answer = make(output_schema=Forecast).run(QUESTION)
        assert isinstance(answer.content, Forecast), answer.content
        check_forecast(answer.content.model_dump())

    @check
    def error():
        answer = make(UNKNOWN).run("Hello")
        assert str(answer.status).endswith(("ERROR", "error")), answer.status
        assert UNKNOWN in str(answer.content), answer.content


run("chat")
run("responses")
