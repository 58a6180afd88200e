"""google-adk: an LlmAgent over litellm."""

import json
from contextlib import suppress
from typing import Literal

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
from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from litellm import NotFoundError

check = Checks("chat")


async def events_of(text, name=MODEL, most=200, streamed=False, model_options=None, **options):
    """Run an agent for one message; return its events."""
    model = LiteLlm(model=f"openai/{name}", api_base=V1, api_key=KEY, num_retries=0, **(model_options or {}))
    agent = LlmAgent(
        name="helper",
        model=model,
        instruction=SYSTEM,
        generate_content_config=types.GenerateContentConfig(max_output_tokens=most),
        **options,
    )
    runner = InMemoryRunner(agent=agent, app_name="checks")
    session = await runner.session_service.create_session(app_name="checks", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if streamed else StreamingMode.NONE, max_llm_calls=4)
    message = types.Content(role="user", parts=[types.Part(text=text)])
    return [
        event
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message, run_config=config
        )
    ]


def text_of(event):
    return "".join(part.text or "" for part in event.content.parts) if event.content and event.content.parts else ""


@check
async def plain():
    events = await events_of("Say hello.", most=16)
    assert text_of(events[-1]), events
    assert events[-1].usage_metadata.candidates_token_count <= 16


@check
async def streaming():
    events = await events_of("Say hello.", most=16, streamed=True)
    assert len([event for event in events if event.partial and text_of(event)]) > 3, events


@check
async def tool():
    check_answer(text_of((await events_of(ONE_CALL, tools=[get_weather, get_time]))[-1]), "get_weather")


@check
async def parallel():
    events = await events_of(TWO_CALLS, tools=[get_weather, get_time])
    assert len(events[0].get_function_calls()) == 2, events
    check_answer(text_of(events[-1]), "get_weather", "get_time")


@check
async def streamed_tool():
    events = await events_of(TWO_CALLS, streamed=True, tools=[get_weather, get_time])
    check_answer(text_of(events[-1]), "get_weather", "get_time")


@check
async def required():
    seen = []

    def forecast(city: Literal["Paris", "Rome"], days: int) -> str:
        """Keep a forecast."""
        seen.append((city, days))
        return "kept"

    # A call is forced in every turn, until the limit of turns.
    with suppress(LlmCallsLimitExceededError):
        await events_of(QUESTION, tools=[forecast], model_options={"tool_choice": "required"})
    assert type(seen[0][1]) is int, seen


@check
async def structured():
    events = await events_of(QUESTION, output_schema=Forecast)
    check_forecast(json.loads(text_of(events[-1])))


@check
def error():
    unknown = raised(lambda: events_of("Hello", UNKNOWN), NotFoundError)
    assert UNKNOWN in str(unknown), unknown
