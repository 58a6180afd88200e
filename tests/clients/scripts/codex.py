"""Codex CLI, without its user interface, in a scratch folder."""

from client_checks import KEY, MODEL, SECRET, UNKNOWN, V1, Checks, run_program

check = Checks("responses")
SHELL = 'exec_command({"cmd": "cat note.txt"})'


def ask(text, model=MODEL):
    server = f'name="moeserve", base_url="{V1}", env_key="API_KEY", wire_api="responses"'
    provider = f"{{{server}, request_max_retries=0, stream_max_retries=0}}"
    options = ["-c", "model_provider=moeserve", "-c", f"model_providers.moeserve={provider}", "-m", model]
    return run_program(
        ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", *options, text], API_KEY=KEY
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
    assert UNKNOWN in ask("Hello", UNKNOWN).rpartition("ERROR")[2]
