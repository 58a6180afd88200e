"""llama-index: OpenAILike, alone and in a FunctionAgent."""

import json

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
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

check = Checks("chat")


def make(name=MODEL, most=200):
    return OpenAILike(
        model=name,
        api_base=V1,
        api_key=KEY,
        max_retries=0,
        timeout=120,
        max_tokens=most,
        context_window=8192,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def said(text):
    return [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=text)]


def agent(streaming, side_by_side=False):
    return FunctionAgent(
        tools=[FunctionTool.from_defaults(get_weather), FunctionTool.from_defaults(get_time)],
        llm=make(),
        system_prompt=SYSTEM,
        streaming=streaming,
        allow_parallel_tool_calls=side_by_side,
    )


@check
def plain():
    answer = make(most=16).chat(said("Say hello."))
    assert answer.message.content
    assert answer.raw.usage.completion_tokens <= 16


@check
def streaming():
    pieces = [piece.delta for piece in make(most=16).stream_chat(said("Say hello.")) if piece.delta]
    assert len(pieces) > 3, pieces


@check
async def tool():
    check_answer(str(await agent(False).run(ONE_CALL)), "get_weather")


@check
async def parallel():
    check_answer(str(await agent(False, side_by_side=True).run(TWO_CALLS)), "get_weather", "get_time")


@check
async def streamed_tool():
    handler = agent(True).run(TWO_CALLS)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream) and event.delta]
    check_answer(str(await handler), "get_weather", "get_time")
    assert len(pieces) > 3, pieces


@check
def required():
    def forecast(city: str, days: int, summary: str) -> str:
        return "kept"

    tool = FunctionTool.from_defaults(forecast, fn_schema=Forecast, description="Keep a forecast.")
    answer = make().chat_with_tools([tool], QUESTION, tool_required=True)
    (call, *_) = make().get_tool_calls_from_response(answer)
    check_forecast(call.tool_kwargs)


@check
def structured():
    check_forecast(json.loads(make().as_structured_llm(Forecast).chat(said(QUESTION)).message.content))


@check
def error():
    raised(lambda: make(UNKNOWN).chat(said("Hello")), openai.NotFoundError)
