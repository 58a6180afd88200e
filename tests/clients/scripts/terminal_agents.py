"""Terminal agents without their user interfaces, in a scratch folder; CLIENT names the one that is installed.

An agent is a function: it writes what the agent reads of its settings, and returns the command for a request and the
variables. All requests of these are streamed and offer tools, but for mini-swe-agent's, which are not streamed.
"""

import json
import os
from pathlib import Path

from client_checks import KEY, MODEL, SECRET, UNKNOWN, V1, Checks, run_program

CONTEXT, ANSWER = 32768, 512
HOME = Path.home()
OPENAI = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": V1, "OPENAI_API_BASE": V1}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def qwen_code(text, model):
    # All its tools make a first prompt of 18,000 tokens.
    write(HOME / ".qwen/settings.json", {"tools": {"core": ["run_shell_command"]}})
    variables = {**OPENAI, "OPENAI_MODEL": model, "QWEN_STREAM_IDLE_TIMEOUT_MS": "2300000"}
    return ["qwen", "--auth-type", "openai", "--yolo", "-p", text], variables


def pi(text, model):
    provider = {
        "baseUrl": V1,
        "api": "openai-completions",
        "apiKey": KEY,
        "models": [{"id": name, "contextWindow": CONTEXT, "maxTokens": ANSWER} for name in (MODEL, UNKNOWN)],
    }
    write(HOME / ".pi/agent/models.json", {"providers": {"moeserve": provider}})
    return ["pi", "-p", text, "--provider", "moeserve", "--model", model], {"PI_OFFLINE": "1"}


def cline(text, model):
    run_program(["cline", "auth", "openai-compatible", "-k", KEY, "-m", model, "-b", V1])
    return ["cline", "--retries", "1", text], {}


def continue_cli(text, model):
    options = {"contextLength": CONTEXT, "maxTokens": ANSWER}
    served = {"name": model, "provider": "openai", "model": model, "apiBase": V1, "apiKey": KEY, "roles": ["chat"]}
    served |= {"capabilities": ["tool_use"], "defaultCompletionOptions": options}
    # JSON is YAML too.
    config = {"name": "moeserve", "version": "0.0.1", "schema": "v1", "models": [served]}
    path = write(HOME / "config.yaml", config)
    return ["cn", "-p", text, "--auto", "--config", path], {"CONTINUE_TELEMETRY_ENABLED": "0"}


def gptme(text, model):
    command = ["gptme", "--non-interactive", "-m", f"local/{model}", "--tool-format", "tool", "--tools", "shell", text]
    return command, {**OPENAI, "GPTME_TIKTOKEN_TIMEOUT": "0"}


def mini_swe_agent(text, model):
    # It ends where the model runs a certain command; the demo answers in words.
    settings = ["-c", "mini.yaml", "-c", "agent.step_limit=2"]
    variables = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    variables |= {**OPENAI, "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
    return ["mini", "-y", "--exit-immediately", "-m", f"openai/{model}", "-t", text, *settings], variables


# By clients' names: the command, the call that shows the note, and whether the note is in each result of two calls and
# the agent shows the model's whole answer. qwen-code may give the second result of two commands at once as empty.
AGENTS = {
    "qwen-code": (qwen_code, 'run_shell_command({"command": "cat note.txt", "is_background": false})', False),
    "pi": (pi, 'bash({"command": "cat note.txt"})', True),
    "cline": (cline, 'run_commands({"commands": ["cat note.txt"]})', True),
    "continue": (continue_cli, 'Bash({"command": "cat note.txt"})', True),
    "gptme": (gptme, 'shell({"command": "cat note.txt"})', False),
    "mini-swe-agent": (mini_swe_agent, 'bash({"command": "cat note.txt"})', False),
}
CLIENT = os.environ["CLIENT"]
agent, SHELL, SHOWS_ANSWERS = AGENTS[CLIENT]
check = Checks("chat")


def ask(text, model=MODEL):
    command, variables = agent(text, model)
    return run_program(command, **variables)


def check_note(said, times):
    """Raise AssertionError unless the agent shows the command's output, and the model's answer about it."""
    assert SECRET in said, said[-1500:]
    assert not SHOWS_ANSWERS or said.rpartition("The tools said:")[2].count(SECRET) == times, said[-1500:]


for name in ("plain", "streaming", "required", "structured"):
    check.cannot(name, "every request of it offers tools")


def one():
    check_note(ask(f"Use {SHELL} and tell me what it says."), 1)


def two():
    check_note(ask(f"Use {SHELL} and {SHELL} at once, and tell me what they say."), 2)


@check
def parallel():
    two()


if CLIENT == "mini-swe-agent":
    check.cannot("streamed_tool", "it does not stream")

    @check
    def tool():
        one()

else:
    check.cannot("tool", "it streams")

    @check
    def streamed_tool():
        one()


@check
def error():
    said = ask("Hello to you", UNKNOWN)
    assert UNKNOWN in said, said[-1500:]
