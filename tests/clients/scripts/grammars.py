"""Libraries that hold the model to a form by fields of other servers; CLIENT names the one that is installed."""

import json
import os
import re

from client_checks import FORECAST_SCHEMA, KEY, MODEL, QUESTION, SYSTEM, UNKNOWN, V1, Checks, check_forecast, raised

SERVER = {"base_url": V1, "api_key": KEY, "max_retries": 0, "timeout": 120}
DATE = r"[12]\d{3}-\d{2}-\d{2}"
NO_TOOLS = "its models call no tools"


def outlines_models():
    """Outlines asks in the ways of OpenAI, vLLM and SGLang."""
    import outlines
    from outlines.inputs import Chat
    from outlines.types import JsonSchema, Regex

    openai = __import__("openai")
    makers = {"chat": outlines.from_openai, "chat (vLLM)": outlines.from_vllm, "chat (SGLang)": outlines.from_sglang}
    for api, make in makers.items():
        check = Checks(api)
        client = openai.OpenAI(**SERVER)
        model = make(client, MODEL)

        @check
        def plain(model=model):
            assert model("Say hello.", max_tokens=16)

        @check
        def streaming(model=model):
            assert len(list(model.stream("Say hello.", max_tokens=16))) > 3

        @check
        def structured(model=model, api=api):
            form = JsonSchema(json.dumps(FORECAST_SCHEMA))
            check_forecast(json.loads(model(QUESTION, form, max_tokens=200)))
            if api != "chat":
                assert re.fullmatch(DATE, model("When?", Regex(DATE), max_tokens=20), re.ASCII)
            said = [{"role": "system", "content": SYSTEM * 12}, {"role": "user", "content": QUESTION}]
            first = model(Chat(said), max_tokens=16)
            again = [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
            assert model(Chat([*said, *again]), max_tokens=16)

        @check
        def error(make=make, client=client):
            raised(lambda: make(client, UNKNOWN)("Hello"), Exception)

        for name in ("tool", "parallel", "streamed_tool", "required"):
            check.cannot(name, NO_TOOLS)


def guidance_models():
    """Guidance asks in the ways of OpenAI and vLLM, and always streams."""
    from guidance import assistant, gen, system, user
    from guidance import json as form_of
    from guidance.models import OpenAI
    from guidance.models.experimental import VLLMModel

    for api, make in {"chat": OpenAI, "chat (vLLM)": VLLMModel}.items():
        check = Checks(api)

        def started(name=MODEL, make=make, question=QUESTION):
            # Its interpreter of vLLM passes its options on to places that know but these.
            options = SERVER if make is OpenAI else {"base_url": V1, "api_key": KEY}
            model = make(name, echo=False, **options)
            with system():
                model += SYSTEM * 12
            with user():
                model += question
            return model

        @check
        def streaming(started=started):
            model = started(question="Say hello.")
            with assistant():
                model += gen("first", max_tokens=16)
            with user():
                model += "And again."
            with assistant():
                model += gen("second", max_tokens=16)
            assert model["first"]
            assert model["second"]

        @check
        def structured(started=started, api=api):
            model = started()
            with assistant():
                model += form_of("forecast", schema=FORECAST_SCHEMA, max_tokens=200)
            check_forecast(json.loads(model["forecast"]))
            if api != "chat":
                model = started()
                with assistant():
                    model += gen("date", regex=DATE, max_tokens=20)
                assert re.fullmatch(DATE, model["date"], re.ASCII)

        @check
        def error(started=started):
            def ask():
                model = started(UNKNOWN)
                with assistant():
                    model += gen("text", max_tokens=8)
                return str(model)

            raised(ask, Exception)

        check.cannot("plain", "it streams")
        for name in ("tool", "parallel", "streamed_tool", "required"):
            check.cannot(name, NO_TOOLS)


{"outlines": outlines_models, "guidance": guidance_models}[os.environ["CLIENT"]]()
