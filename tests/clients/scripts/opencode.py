"""opencode, without its user interface, in a scratch folder."""

import json
from pathlib import Path

from client_checks import KEY, MODEL, UNKNOWN, V1, Checks, check_agent, run_program

check = Checks("chat")
SHELL = 'bash({"command": "cat note.txt", "description": "Read the note"})'
LIMIT = {"context": 16384, "output": 256}


def ask(text, model=MODEL):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "moeserve",
        "options": {"baseURL": V1, "apiKey": KEY},
        "models": {name: {"name": name, "limit": LIMIT} for name in (MODEL, UNKNOWN)},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"moeserve": provider},
        "model": f"moeserve/{model}",
        "small_model": f"moeserve/{model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        # Its whole set of tools does not fit into the demo's context.
        "tools": {"*": False, "bash": True},
    }
    folder = Path("project")
    folder.mkdir(exist_ok=True)
    (folder / "opencode.json").write_text(json.dumps(config))
    # It puts an argument with spaces into quotes, and escapes those in it.
    command = ["opencode", "run", "--model", f"moeserve/{model}", *text.split()]
    return run_program(command, OPENCODE_DISABLE_MODELS_FETCH="1")


check_agent(check, ask, SHELL)


@check
def error():
    said = ask("Hello", UNKNOWN)
    assert UNKNOWN in said, said[-1500:]
    assert "does not exist" in said, said[-1500:]
