"""instructor: tools, JSON and JSON schema as the ways to a structured answer."""

import instructor
import openai
from client_checks import (
    KEY,
    MODEL,
    QUESTION,
    SYSTEM,
    UNKNOWN,
    V1,
    Checks,
    check_forecast,
    raised,
)
from client_models import Forecast
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI

check = Checks("chat")


def make(mode=instructor.Mode.TOOLS):
    return instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0, timeout=120), mode=mode)


def said(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def ask(client, **options):
    return client.chat.completions.create(
        messages=said(QUESTION),
        **{"model": MODEL, "max_tokens": 300, "max_retries": 0, "response_model": Forecast} | options,
    )


for name in ("plain", "streaming", "tool", "parallel", "cached"):
    check.cannot(name, "it asks for structured answers alone")


@check
def streamed_tool():
    options = {"messages": said(QUESTION), "model": MODEL, "max_tokens": 300, "response_model": Forecast}
    pieces = list(make().chat.completions.create_partial(**options))
    assert len(pieces) > 3
    check_forecast(pieces[-1].model_dump())


@check
def required():
    check_forecast(ask(make()).model_dump())
    check_forecast(ask(make(instructor.Mode.TOOLS_STRICT)).model_dump())


@check
def structured():
    check_forecast(ask(make(instructor.Mode.JSON_SCHEMA)).model_dump())


@check
def error():
    raised(lambda: ask(make(), model=UNKNOWN), (openai.NotFoundError, InstructorRetryException))
