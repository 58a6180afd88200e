"""openai-agents: its default API (responses) and its chat model."""

from typing import Annotated, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent import StopAtTools
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
from openai import AsyncOpenAI
from pydantic import Field

set_tracing_disabled(True)


def make(kind, name=MODEL, *, most=200, choice=None, **options):
    """Return an agent with a client of its own: each check has a loop of its own."""
    model = kind(model=name, openai_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=120))
    # An answer that was cut is an error for this client.
    several = False if choice else None
    settings = ModelSettings(max_tokens=most, tool_choice=choice, parallel_tool_calls=several, temperature=0)
    return Agent(name="Helper", instructions=SYSTEM, model=model, model_settings=settings, **options)


TOOLS = [function_tool(get_weather), function_tool(get_time)]


def run(check, kind):
    @check
    async def plain():
        result = await Runner.run(make(kind), "Say hello.")
        assert result.final_output
        assert 0 < result.context_wrapper.usage.output_tokens <= 200

    @check
    async def streaming():
        result = Runner.run_streamed(make(kind), "Say hello.")
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert len(pieces) > 3
        assert "".join(pieces) == result.final_output

    @check
    async def tool():
        check_answer((await Runner.run(make(kind, tools=TOOLS), ONE_CALL)).final_output, "get_weather")

    @check
    async def parallel():
        result = await Runner.run(make(kind, tools=TOOLS), TWO_CALLS)
        assert len(result.raw_responses) == 2, "the calls did not come in one answer"
        check_answer(result.final_output, "get_weather", "get_time")

    @check
    async def streamed_tool():
        result = Runner.run_streamed(make(kind, tools=TOOLS), TWO_CALLS)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert names.count("tool_called") == 2, names
        check_answer(result.final_output, "get_weather", "get_time")

    @check
    async def required():
        seen = []

        @function_tool
        def forecast(
            city: Literal["Paris", "Rome"],
            days: Annotated[int, Field(ge=1, le=9)],
            summary: Annotated[str, Field(max_length=40)],
        ) -> str:
            """Keep a forecast."""
            seen.append({"city": city, "days": days, "summary": summary})
            return "kept"

        agent = make(
            kind, tools=[forecast], choice="required", tool_use_behavior=StopAtTools(stop_at_tool_names=["forecast"])
        )
        await Runner.run(agent, QUESTION)
        check_forecast(seen[0])

    @check
    async def structured():
        result = await Runner.run(make(kind, output_type=Forecast), QUESTION)
        check_forecast(result.final_output.model_dump())
        # Tools and a schema in one request: the calls first, then an answer of the schema.
        result = await Runner.run(make(kind, output_type=Forecast, tools=TOOLS), ONE_CALL)
        check_forecast(result.final_output.model_dump())

    @check
    def error():
        unknown = raised(lambda: Runner.run(make(kind, UNKNOWN), "Hello"), openai.NotFoundError)
        assert unknown.code == "model_not_found", unknown


run(Checks("responses"), OpenAIResponsesModel)
run(Checks("chat"), OpenAIChatCompletionsModel)
