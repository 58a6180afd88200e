"""semantic-kernel: its OpenAI connector in a ChatCompletionAgent."""

import json
from typing import Annotated

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
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import KernelArguments, kernel_function

check = Checks("chat")


class Tools:
    @kernel_function(description="Return the weather in a city.")
    def get_weather(self, city: Annotated[str, "The name of the city."]) -> str:
        return get_weather(city)

    @kernel_function(description="Return the time in a zone.")
    def get_time(self, zone: Annotated[str, "The name of the time zone."]) -> str:
        return get_time(zone)


def agent(name=MODEL, most=200, plugins=(), choice=None, **settings):
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=120)
    return ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id=name, async_client=client),
        name="Helper",
        instructions=SYSTEM,
        plugins=list(plugins),
        function_choice_behavior=choice,
        arguments=KernelArguments(OpenAIChatPromptExecutionSettings(max_tokens=most, **settings)),
    )


def spelled(text):
    """Its tools have the name of their plugin before their own."""
    return text.replace("get_", "Tools-get_")


@check
async def plain():
    answer = await agent(most=16).get_response(messages="Say hello.")
    assert str(answer.message)


@check
async def streaming():
    pieces = [str(piece.message) async for piece in agent(most=16).invoke_stream(messages="Say hello.")]
    assert len(pieces) > 3, pieces


@check
async def tool():
    answer = await agent(plugins=[Tools()]).get_response(messages=spelled(ONE_CALL))
    check_answer(str(answer.message), "get_weather")


@check
async def parallel():
    answer = await agent(plugins=[Tools()]).get_response(messages=spelled(TWO_CALLS))
    check_answer(str(answer.message), "get_weather", "get_time")


@check
async def streamed_tool():
    pieces = [str(piece.message) async for piece in agent(plugins=[Tools()]).invoke_stream(messages=spelled(TWO_CALLS))]
    check_answer("".join(pieces), "get_weather", "get_time")
    assert len(pieces) > 3, pieces


@check
async def required():
    seen = []

    class Keeper:
        @kernel_function(description="Keep a forecast.")
        def forecast(self, city: Annotated[str, "Paris or Rome."], days: int) -> str:
            seen.append((city, days))
            return "kept"

    choice = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    async for _ in agent(plugins=[Keeper()], choice=choice, parallel_tool_calls=False).invoke(messages=QUESTION):
        pass
    assert type(seen[0][1]) is int, seen


@check
async def structured():
    answer = await agent(response_format=Forecast).get_response(messages=QUESTION)
    check_forecast(json.loads(str(answer.message)))


@check
def error():
    unknown = raised(lambda: agent(UNKNOWN).get_response(messages="Hello"), ServiceResponseException)
    assert UNKNOWN in str(unknown.__cause__ or unknown), unknown
