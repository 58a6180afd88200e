"""langchain's ChatOpenAI in langgraph agents: chat completions and responses."""

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
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI


def text_of(message):
    return message.text if isinstance(message.text, str) else message.text()


def run(api):
    check = Checks(api)

    def make(name=MODEL, most=200):
        return ChatOpenAI(
            model=name,
            base_url=V1,
            api_key=KEY,
            max_retries=0,
            timeout=120,
            max_tokens=most,
            use_responses_api=api == "responses",
        )

    def agent():
        return create_agent(make(), tools=[get_weather, get_time], system_prompt=SYSTEM)

    def asked(text):
        return {"messages": [{"role": "user", "content": text}]}

    @check
    def plain():
        answer = make(most=16).invoke([("system", SYSTEM), ("user", "Say hello.")])
        assert text_of(answer)
        assert 0 < answer.usage_metadata["output_tokens"] <= 16

    @check
    def streaming():
        pieces = [text_of(chunk) for chunk in make(most=16).stream("Say hello.")]
        assert len([piece for piece in pieces if piece]) > 3, pieces

    @check
    def tool():
        check_answer(text_of(agent().invoke(asked(ONE_CALL))["messages"][-1]), "get_weather")

    @check
    def parallel():
        messages = agent().invoke(asked(TWO_CALLS))["messages"]
        assert len(messages[1].tool_calls) == 2, messages
        check_answer(text_of(messages[-1]), "get_weather", "get_time")

    @check
    def streamed_tool():
        pieces = [
            text_of(chunk)
            for chunk, about in agent().stream(asked(TWO_CALLS), stream_mode="messages")
            if isinstance(chunk, AIMessageChunk)
        ]
        check_answer("".join(pieces), "get_weather", "get_time")

    @check
    def required():
        model = make().bind_tools([Forecast], tool_choice="required", strict=True)
        (call,) = model.invoke(QUESTION).tool_calls[:1]
        assert call["name"] == "Forecast"
        check_forecast(call["args"])

    @check
    def structured():
        for method in ("json_schema", "function_calling"):
            check_forecast(make().with_structured_output(Forecast, method=method).invoke(QUESTION).model_dump())

    @check
    def error():
        unknown = raised(lambda: make(UNKNOWN).invoke("Hello"), openai.NotFoundError)
        assert unknown.code == "model_not_found", unknown


run("chat")
run("responses")
