"""Codex CLI, without its user interface, in a scratch folder."""

from client_checks import KEY, MODEL, UNKNOWN, V1, Checks, check_agent, run_program

check = Checks("responses")
SHELL = 'exec_command({"cmd": "cat note.txt"})'


def ask(text, model=MODEL):
    server = f'name="moeserve", base_url="{V1}", env_key="API_KEY", wire_api="responses"'
    provider = f"{{{server}, request_max_retries=0, stream_max_retries=0}}"
    options = ["-c", "model_provider=moeserve", "-c", f"model_providers.moeserve={provider}", "-m", model]
    return run_program(
        ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", *options, text], API_KEY=KEY
    )


check_agent(check, ask, SHELL)


@check
def error():
    assert UNKNOWN in ask("Hello", UNKNOWN).rpartition("ERROR")[2]
