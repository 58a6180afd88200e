"""pydantic-ai: its OpenAI models (responses, chat) and its Anthropic model (messages)."""

from typing import Literal

from client_checks import (
    KEY,
    MODEL,
    ONE_CALL,
    QUESTION,
    SYSTEM,
    TWO_CALLS,
    UNKNOWN,
    URL,
    V1,
    Checks,
    check_answer,
    check_forecast,
    get_time,
    get_weather,
    raised,
)
from client_models import Forecast
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, ModelRetry, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.anthropic import AnthropicModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Fixed(BaseModel):
    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]
    summary: Literal["sun", "rain"]


# For Anthropic's API it leaves ranges and lengths out of schemas, and the demo does not read the hints in their place.
OUTPUTS = {"responses": Forecast, "chat": Forecast, "messages": Fixed}
MAKERS = {
    "responses": lambda name: OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=V1, api_key=KEY)),
    "chat": lambda name: OpenAIChatModel(name, provider=OpenAIProvider(base_url=V1, api_key=KEY)),
    "messages": lambda name: AnthropicModel(
        name,
        provider=AnthropicProvider(base_url=URL, api_key=KEY),
        # It knows the names of the models that can do this.
        profile=AnthropicModelProfile(supports_json_schema_output=True),
    ),
}


def run(api):
    check = Checks(api)

    def make(name=MODEL, most=200, **options):
        return Agent(MAKERS[api](name), instructions=SYSTEM, model_settings={"max_tokens": most}, **options)

    @check
    async def plain():
        result = await make(most=16).run("Say hello.")
        assert result.output
        assert 0 < result.usage.output_tokens <= 16

    @check
    async def streaming():
        async with make(most=16).run_stream("Say hello.") as result:
            pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
        assert len(pieces) > 3
        assert result.usage.output_tokens <= 16

    @check
    async def tool():
        check_answer((await make(tools=[get_weather, get_time]).run(ONE_CALL)).output, "get_weather")

    @check
    async def parallel():
        result = await make(tools=[get_weather, get_time]).run(TWO_CALLS)
        assert result.usage.requests == 2, "the calls did not come in one answer"
        check_answer(result.output, "get_weather", "get_time")

    @check
    async def streamed_tool():
        async with make(tools=[get_weather, get_time]).run_stream(TWO_CALLS) as result:
            text = await result.get_output()
        check_answer(text, "get_weather", "get_time")

    @check
    async def required():
        agent = make(output_type=ToolOutput(OUTPUTS[api], name="forecast", strict=True))
        refused = []

        @agent.output_validator
        def refuse_once(value):
            # The second request has a message of the system, or a retry, in the middle of the conversation.
            if not refused:
                refused.append(value)
                raise ModelRetry("Think again.")
            return value

        check_forecast((await agent.run(QUESTION)).output.model_dump())

    @check
    async def structured():
        check_forecast((await make(output_type=NativeOutput(OUTPUTS[api])).run(QUESTION)).output.model_dump())

    @check
    def error():
        unknown = raised(lambda: make(UNKNOWN).run("Hello"), ModelHTTPError)
        assert unknown.status_code == 404, unknown


for api in MAKERS:
    run(api)
