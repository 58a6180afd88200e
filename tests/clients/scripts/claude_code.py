"""Claude Code, without its user interface, in a scratch folder."""

from client_checks import KEY, MODEL, SECRET, UNKNOWN, URL, Checks, run_program

check = Checks("messages")
SHELL = 'Bash({"command": "cat note.txt", "description": "Read the note"})'


def ask(text, model=MODEL):
    # Its whole set of tools does not fit into the demo's context.
    options = ["--model", model, "--tools", "Bash", "--allowedTools", "Bash", "--output-format", "text"]
    return run_program(
        ["claude", "-p", text, *options],
        ANTHROPIC_BASE_URL=URL,
        ANTHROPIC_AUTH_TOKEN=KEY,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=model,
        ANTHROPIC_SMALL_FAST_MODEL=model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="512",
        CLAUDE_CODE_MAX_RETRIES="0",
        MAX_THINKING_TOKENS="0",
        DISABLE_AUTOUPDATER="1",
        DISABLE_TELEMETRY="1",
    )


for name in ("plain", "streaming", "tool", "required", "structured"):
    check.cannot(name, "every request of it is streamed and offers tools")


@check
def parallel():
    said = ask(f"Use {SHELL} and {SHELL} at once, and tell me what they say.")
    assert said.rpartition("The tools said:")[2].count(SECRET) == 2, said[-1500:]


@check
def streamed_tool():
    said = ask(f"Use {SHELL} and tell me what it says.")
    assert SECRET in said.rpartition("The tools said:")[2], said[-1500:]


@check
def error():
    said = ask("Hello", UNKNOWN)
    assert UNKNOWN in said, said[-1500:]
