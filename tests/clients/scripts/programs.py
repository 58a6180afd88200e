"""Programs of the command line that are no agents with tools of their own; CLIENT names the one that is installed."""

import json
import os
import subprocess
from pathlib import Path

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
    check_forecast,
    run_program,
)

HOME = Path.home()
check = Checks("chat")

FUNCTIONS = """
def get_weather(city: str) -> str:
    "Return the weather in a city."
    return f"22 degrees in {city}"

def get_time(zone: str) -> str:
    "Return the time in a zone."
    return f"half past nine in {zone}"
"""


def aider():
    """It has the model write edits as text: no tools."""

    def ask(text, *options, name=MODEL):
        settings = {
            name: {"max_input_tokens": 32768, "max_output_tokens": 64}
            for name in (f"openai/{MODEL}", f"openai/{UNKNOWN}")
        }
        extra = [{"name": name, "extra_params": {"max_tokens": 64, "num_retries": 0}} for name in settings]
        (HOME / "metadata.json").write_text(json.dumps(settings))
        (HOME / "settings.yml").write_text(json.dumps(extra))
        files = ["--model-metadata-file", f"{HOME}/metadata.json", "--model-settings-file", f"{HOME}/settings.yml"]
        quiet = ["--no-git", "--yes-always", "--no-check-update", "--no-analytics", "--no-pretty", "--map-tokens", "0"]
        command = ["aider", "--model", f"openai/{name}", *files, *quiet, *options, "--message", text]
        return run_program(command, OPENAI_API_KEY=KEY, OPENAI_API_BASE=V1)

    @check
    def plain():
        said = ask("Say hello.", "--no-stream")
        assert "token" in said.lower(), said[-1500:]

    @check
    def streaming():
        said = ask("And again.", "--stream", "--restore-chat-history")
        assert "Restored previous conversation" in said, said[-1500:]
        assert "token" in said.lower(), said[-1500:]

    @check
    def error():
        said = ask("Hello", name=UNKNOWN)
        assert "does not exist" in " ".join(said.split()), said[-1500:]

    for name in ("tool", "parallel", "streamed_tool", "required", "structured"):
        check.cannot(name, aider.__doc__)
    # Half of a second prompt is cached.
    check.cannot("cached", "it moves what it reminds the model of behind the newest message")


def llm():
    folder = HOME / "llm"
    folder.mkdir()
    served = [
        {
            "model_id": name,
            "model_name": name,
            "api_base": V1,
            "api_key_name": "moeserve",
            "supports_tools": True,
            "supports_schema": True,
        }
        for name in (MODEL, UNKNOWN)
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(served))
    (folder / "keys.json").write_text(json.dumps({"moeserve": KEY}))
    tools = HOME / "tools.py"
    tools.write_text(FUNCTIONS)

    def ask(text, *options, name=MODEL):
        return run_program(["llm", "prompt", text, "-m", name, *options], LLM_USER_PATH=str(folder))

    short = ("-o", "max_tokens", "16")

    @check
    def plain():
        assert ask("Say hello.", "-s", SYSTEM * 12, "--no-stream", *short).strip()

    @check
    def streaming():
        assert ask("And again.", "-c", *short).strip()

    def acted(text, *options):
        return ask(text, "--functions", str(tools), *options).rpartition("The tools said:")[2]

    @check
    def tool():
        assert "22 degrees in Paris" in acted(ONE_CALL, "--no-stream")

    @check
    def parallel():
        said = acted(TWO_CALLS, "--no-stream")
        assert "22 degrees in Paris" in said, said
        assert "half past nine in UTC" in said, said

    @check
    def streamed_tool():
        assert "22 degrees in Paris" in acted(ONE_CALL)

    @check
    def structured():
        check_forecast(json.loads(ask(QUESTION, "--schema", json.dumps(FORECAST_SCHEMA), "--no-stream")))

    @check
    def error():
        said = ask("Hello", name=UNKNOWN)
        assert "does not exist" in said, said

    check.cannot("required", "it has no tool_choice")


def promptfoo():
    """It compares answers, none of them streamed, and runs no tools."""

    def ask(messages, name=MODEL, **options):
        config = {"apiBaseUrl": V1, "apiKey": KEY, "max_tokens": 200, **options}
        content = {
            "prompts": ["file://prompt.json"],
            "providers": [{"id": f"openai:chat:{name}", "config": config}],
            "tests": [{"vars": {"none": "none"}}],
        }
        Path("prompt.json").write_text(json.dumps(messages))
        Path("promptfooconfig.json").write_text(json.dumps(content))
        command = ["promptfoo", "eval", "-c", "promptfooconfig.json", "-o", "out.json", "--no-cache", "--no-table"]
        quiet = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1", "PROMPTFOO_RETRY_5XX": "false"}
        done = subprocess.run(
            command,
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        (result,) = json.loads(Path("out.json").read_text())["results"]["results"]
        return result.get("response", {"error": done.stdout})

    def said(text):
        return [{"role": "system", "content": SYSTEM * 12}, {"role": "user", "content": text}]

    @check
    def plain():
        first = ask(said("Say hello."), max_tokens=16)["output"]
        assert first
        again = [{"role": "assistant", "content": first}, {"role": "user", "content": "And again."}]
        assert ask([*said("Say hello."), *again], max_tokens=16)["output"]

    @check
    def required():
        function = {"name": "forecast", "parameters": FORECAST_SCHEMA, "strict": True}
        tool = {"type": "function", "function": function}
        (call, *_) = ask(said(QUESTION), tools=[tool], tool_choice="required")["output"]
        check_forecast(json.loads(call["function"]["arguments"]))

    @check
    def structured():
        form = {"name": "forecast", "schema": FORECAST_SCHEMA, "strict": True}
        value = ask(said(QUESTION), response_format={"type": "json_schema", "json_schema": form})["output"]
        check_forecast(json.loads(value) if isinstance(value, str) else value)

    @check
    def error():
        assert "does not exist" in ask(said("Hello"), UNKNOWN)["error"]

    for name in ("streaming", "tool", "parallel", "streamed_tool"):
        check.cannot(name, promptfoo.__doc__)


{"aider": aider, "llm": llm, "promptfoo": promptfoo}[os.environ["CLIENT"]]()
