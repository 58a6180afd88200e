"""Frameworks for agents that chat by the openai package or litellm; CLIENT names the one that is installed.

A framework is a class: `say` and `stream` answer a question, `act` has an agent use tools, whole or streamed, `fill`
returns a forecast as a dictionary, `force` the arguments of a call that the model has to make.
"""

import json
import os

from client_checks import (
    FORECAST_SCHEMA,
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

TOOLS = [get_weather, get_time]
HELLO = "Say hello."


class Autogen:
    def __init__(self):
        import openai
        from autogen_agentchat.agents import AssistantAgent
        from autogen_ext.models.openai import OpenAIChatCompletionClient
        from client_models import Forecast

        self.missing = openai.NotFoundError
        self.form = Forecast
        self.agent, self.client = AssistantAgent, OpenAIChatCompletionClient

    def make(self, name=MODEL, most=200):
        able = dict.fromkeys(("vision", "multiple_system_messages"), False)
        able |= dict.fromkeys(("function_calling", "json_output", "structured_output"), True)
        return self.client(
            model=name,
            base_url=V1,
            api_key=KEY,
            max_retries=0,
            timeout=120,
            max_tokens=most,
            model_info={**able, "family": "unknown"},
        )

    def assistant(self, model, **options):
        return self.agent("assistant", model_client=model, system_message=SYSTEM, **options)

    async def say(self, name=MODEL):
        return (await self.assistant(self.make(name, 16)).run(task=HELLO)).messages[-1].content

    async def stream(self):
        agent = self.assistant(self.make(most=16), model_client_stream=True)
        events = [event async for event in agent.run_stream(task=HELLO)]
        return [event.content for event in events if type(event).__name__ == "ModelClientStreamingChunkEvent"]

    async def act(self, text, streamed):
        agent = self.assistant(self.make(), tools=TOOLS, max_tool_iterations=4, model_client_stream=streamed)
        return (await agent.run(task=text)).messages[-1].content

    async def fill(self):
        agent = self.assistant(self.make(), output_content_type=self.form)
        return (await agent.run(task=QUESTION)).messages[-1].content.model_dump()

    async def force(self):
        from autogen_core.models import UserMessage

        tool = {"name": "forecast", "description": "Keeps a forecast.", "parameters": FORECAST_SCHEMA, "strict": True}
        answer = await self.make().create(
            [UserMessage(content=QUESTION, source="user")], tools=[tool], tool_choice="required"
        )
        return json.loads(answer.content[0].arguments)


class Haystack:
    def __init__(self):
        import openai
        from haystack.components.agents import Agent
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.tools import Tool, create_tool_from_function
        from haystack.utils import Secret

        self.missing = openai.NotFoundError
        self.agent, self.generator, self.secret = Agent, OpenAIChatGenerator, Secret
        self.message, self.tool = ChatMessage, Tool
        self.tools = [create_tool_from_function(function) for function in TOOLS]

    def make(self, name=MODEL, most=200, callback=None, **options):
        return self.generator(
            api_key=self.secret.from_token(KEY),
            model=name,
            api_base_url=V1,
            max_retries=0,
            timeout=120,
            streaming_callback=callback,
            generation_kwargs={"max_tokens": most, **options},
        )

    def asked(self, text):
        return [self.message.from_user(text)]

    def say(self, name=MODEL):
        return self.make(name, 16).run(self.asked(HELLO))["replies"][0].text

    def stream(self):
        pieces = []
        self.make(most=16, callback=pieces.append).run(self.asked(HELLO))
        return [piece.content for piece in pieces if piece.content]

    def act(self, text, streamed):
        callback = (lambda piece: None) if streamed else None
        agent = self.agent(chat_generator=self.make(callback=callback), tools=self.tools, system_prompt=SYSTEM)
        return agent.run(messages=self.asked(text))["last_message"].text

    def fill(self):
        form = {"name": "forecast", "schema": FORECAST_SCHEMA, "strict": True}
        generator = self.make(response_format={"type": "json_schema", "json_schema": form})
        return json.loads(generator.run(self.asked(QUESTION))["replies"][0].text)

    def force(self):
        tool = self.tool("forecast", "Keeps a forecast.", FORECAST_SCHEMA, function=lambda **_: "kept")
        generator = self.make(tool_choice="required")
        return generator.run(self.asked(QUESTION), tools=[tool])["replies"][0].tool_calls[0].arguments


class Strands:
    """Every request of it is streamed."""

    say = None

    def __init__(self):
        import openai
        from client_models import Forecast
        from strands import Agent, tool
        from strands.models.openai import OpenAIModel

        self.missing = openai.NotFoundError
        self.agent, self.model, self.form = Agent, OpenAIModel, Forecast
        self.tools = [tool(function) for function in TOOLS]

    def make(self, name=MODEL, most=200, **options):
        server = {"api_key": KEY, "base_url": V1, "max_retries": 0, "timeout": 120}
        model = self.model(client_args=server, model_id=name, params={"max_tokens": most})
        return self.agent(model=model, system_prompt=SYSTEM, callback_handler=None, **options)

    async def stream(self, name=MODEL):
        return [event["data"] async for event in self.make(name, 400).stream_async(HELLO) if event.get("data")]

    async def act(self, text, streamed):
        return str(await self.make(tools=self.tools).invoke_async(text))

    async def fill(self):
        return (await self.make().structured_output_async(self.form, QUESTION)).model_dump()

    force = None


class Ag2:
    """A call that is forced is forced again after its result."""

    def __init__(self):
        import openai
        from ag2 import Agent
        from ag2.config import OpenAIConfig
        from ag2.events import ModelMessageChunk
        from client_models import Forecast

        self.missing = openai.NotFoundError
        self.agent, self.config, self.form, self.chunk = Agent, OpenAIConfig, Forecast, ModelMessageChunk

    def make(self, name=MODEL, most=200, tools=(), **options):
        server = {"model": name, "base_url": V1, "api_key": KEY, "max_retries": 0, "timeout": 120}
        config = self.config(**server, max_tokens=most, **options)
        return self.agent("assistant", prompt=SYSTEM, config=config, tools=tools)

    async def say(self, name=MODEL):
        return (await self.make(name, 16).ask(HELLO)).body

    async def stream(self):
        from ag2.observers import observer

        pieces = []
        await self.make(most=16, streaming=True).ask(
            HELLO, observers=[observer(self.chunk, lambda event: pieces.append(event.content))]
        )
        return pieces

    async def act(self, text, streamed):
        return (await self.make(tools=TOOLS, streaming=streamed).ask(text)).body

    async def fill(self):
        return (await (await self.make().ask(QUESTION, response_schema=self.form)).content()).model_dump()

    force = None


class Dspy:
    """Its agents have the model write the names of tools into fields of a text: calls of the API are no part of it."""

    stream = act = force = None

    def __init__(self):
        import dspy
        from dspy.utils.exceptions import LMUnsupportedModelError

        self.dspy, self.missing = dspy, LMUnsupportedModelError

    def make(self, name=MODEL, most=200, **options):
        return self.dspy.LM(
            f"openai/{name}", api_base=V1, api_key=KEY, max_tokens=most, cache=False, num_retries=0, **options
        )

    def say(self, name=MODEL):
        model = self.make(name, 16)
        said = [{"role": "system", "content": SYSTEM * 12}, {"role": "user", "content": HELLO}]
        first = model(messages=said)[0]
        again = {"role": "user", "content": "And again."}
        return model(messages=[*said, {"role": "assistant", "content": first}, again])[0]

    def fill(self):
        form = {"name": "forecast", "schema": FORECAST_SCHEMA, "strict": True}
        model = self.make(response_format={"type": "json_schema", "json_schema": form})
        return json.loads(model(QUESTION)[0])


KINDS = {"ag2": Ag2, "autogen": Autogen, "haystack": Haystack, "strands": Strands, "dspy": Dspy}

framework = KINDS[os.environ["CLIENT"]]()
check = Checks("chat")


def checked(*names):
    """Run checks whose way the framework has; the others are reported as impossible."""

    def run(function):
        if any(getattr(framework, name, None) is None for name in names):
            check.cannot(function.__name__, (type(framework).__doc__ or "it has no way to").strip())
            return
        check(function)

    return run


async def result_of(outcome):
    return await outcome if hasattr(outcome, "__await__") else outcome


def acted(text, *calls, streamed=False):
    async def act():
        check_answer(await result_of(framework.act(text, streamed)), *calls)

    return act()


@checked("say")
async def plain():
    assert await result_of(framework.say())


@checked("stream")
async def streaming():
    pieces = await result_of(framework.stream())
    assert len(pieces) > 3, pieces


@checked("say", "act")
def tool():
    return acted(ONE_CALL, "get_weather")


@checked("act")
def parallel():
    return acted(TWO_CALLS, "get_weather", "get_time")


@checked("stream", "act")
def streamed_tool():
    return acted(ONE_CALL, "get_weather", streamed=True)


@checked("force")
async def required():
    check_forecast(await result_of(framework.force()))


@checked("fill")
async def structured():
    check_forecast(await result_of(framework.fill()))


@check
def error():
    raised(lambda: result_of((framework.say or framework.stream)(UNKNOWN)), framework.missing)
