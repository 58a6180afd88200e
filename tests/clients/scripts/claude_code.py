"""Claude Code, without its user interface, in a scratch folder."""

from client_checks import KEY, MODEL, UNKNOWN, URL, Checks, check_agent, run_program

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


check_agent(check, ask, SHELL)


@check
def error():
    said = ask("Hello", UNKNOWN)
    assert UNKNOWN in said, said[-1500:]
