"""`moeserve launch`: an agent gets settings for its session, the user's own stay, and its end is the command's."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher import launch as launching
from launcher.agents import AGENTS, Server
from launcher.launch import launch, run_agent
from launcher.own_service import ServiceNotStarted
from moeserve.listeners import why_not_own
from tests.support.local_http import Handler, local_server

SERVER = Server("http://127.0.0.1:9", "demo", 32768, 1024, "k")


@pytest.fixture
def url() -> Iterator[str]:
    """A server that serves the model `m`."""

    class Models(Handler):
        def do_GET(self) -> None:
            found = {"data": [{"id": "m", "owned_by": "moeserve", "max_model_len": 4096, "default_max_tokens": 777}]}
            self.answer(200, json.dumps(found).encode())

    with local_server(Models) as address:
        yield f"http://{address}"


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file into which an agent that stands in for `claude` writes its arguments and its environment."""
    said = tmp_path / "said"
    program = tmp_path / "claude"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {said}\nenv >> {said}\nexit 7\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return said


def test_an_agent_gets_its_arguments_and_settings_and_its_exit_code_is_returned(
    url: str, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's")
    result = CliRunner().invoke(
        launch, ["--url", url, "--api-key", "k1,k2", "claude", "-p", "hello there", "--url", "x"]
    )
    assert result.exit_code == 7
    lines = said.read_text().splitlines()
    assert lines[:4] == ["-p", "hello there", "--url", "x"]
    assert {f"ANTHROPIC_BASE_URL={url}", "ANTHROPIC_AUTH_TOKEN=k1", "ANTHROPIC_MODEL=m"} <= set(lines)
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=777" in lines
    assert not [line for line in lines if line.startswith("ANTHROPIC_API_KEY=")]


def test_a_server_whose_model_still_loads_is_waited_for_and_bounds_need_not_be_known(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_LOADING_LOOK_S", 0.0)
    contexts = iter([None, None, 4096])

    class Loading(Handler):
        def do_GET(self) -> None:
            model = {"id": "m", "owned_by": "moeserve", "max_model_len": next(contexts), "default_max_tokens": None}
            self.answer(200, json.dumps({"data": [model]}).encode())

    with local_server(Loading) as address:
        result = CliRunner().invoke(launch, ["--url", f"http://{address}", "claude"])
    assert result.exit_code == 7, result.output
    lines = said.read_text().splitlines()
    assert {"CLAUDE_CODE_MAX_OUTPUT_TOKENS=1024", "CLAUDE_CODE_MAX_CONTEXT_TOKENS=4096"} <= set(lines)


def test_a_server_that_tells_no_context_is_refused_in_one_sentence(said: Path) -> None:
    class Foreign(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": "m", "owned_by": "somebody"}]}).encode())

    with local_server(Foreign) as address:
        result = CliRunner().invoke(launch, ["--url", f"http://{address}", "claude"])
    assert result.exit_code == 1
    assert "does not say how long its context is" in result.output


def test_a_missing_agent_is_one_sentence_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(launch, ["opencode"])
    assert result.exit_code == 1
    assert result.output == "Error: opencode is not installed; `npm install -g opencode-ai` installs it.\n"


def test_settings_of_a_service_need_one_that_is_started_here(said: Path) -> None:
    result = CliRunner().invoke(launch, ["--url", "http://127.0.0.1:9", "--serve", "model", "claude"])
    assert result.exit_code == 2


def test_a_server_that_does_not_answer_is_one_sentence(said: Path) -> None:
    result = CliRunner().invoke(launch, ["--url", "http://127.0.0.1:9", "claude"])
    assert result.exit_code == 1
    assert "No server answers at http://127.0.0.1:9" in result.output


def test_this_users_server_at_the_usual_port_is_taken(url: str, said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "USUAL_URL", url)
    monkeypatch.setattr(launching, "why_not_own", partial(why_not_own, int(url.rsplit(":", 1)[1])))
    assert CliRunner().invoke(launch, ["claude"]).exit_code == 7
    assert f"ANTHROPIC_BASE_URL={url}" in said.read_text().splitlines()


@pytest.mark.parametrize("status", [200, 401])
def test_another_users_server_at_the_usual_port_gets_no_key_and_no_agent(
    status: int, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | None] = []

    class Foreign(Handler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            found = {"data": [{"id": "m", "owned_by": "moeserve", "max_model_len": 4096}]}
            self.answer(status, json.dumps(found).encode())

    with local_server(Foreign) as address:
        monkeypatch.setattr(launching, "USUAL_URL", f"http://{address}")
        monkeypatch.setattr(launching, "why_not_own", lambda: "It is another user's.")
        result = CliRunner().invoke(launch, ["--api-key", "secret", "claude"])
    assert (result.exit_code, result.output) == (1, "Error: It is another user's.\n")
    assert keys == [None]
    assert not said.exists()


def test_what_else_another_user_has_at_the_usual_port_is_passed_over(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(Handler):
        def do_GET(self) -> None:
            self.answer(404, b"")

    @contextmanager
    def own_service(_: object) -> Iterator[str]:
        raise ServiceNotStarted("would be started")
        yield ""

    with local_server(Other) as address:
        monkeypatch.setattr(launching, "USUAL_URL", f"http://{address}")
        monkeypatch.setattr(launching, "why_not_own", lambda: "It is another user's.")
        monkeypatch.setattr(launching, "own_service", own_service)
        result = CliRunner().invoke(launch, ["--serve", "demo", "claude"])
    assert result.exit_code == 1
    assert "would be started" in result.output


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each service that would be started where none runs."""
    arguments: list[list[str]] = []

    @contextmanager
    def own_service(given: list[str]) -> Iterator[str]:
        arguments.append(given)
        raise ServiceNotStarted("would be started")
        yield ""

    monkeypatch.setattr(launching, "own_service", own_service)
    monkeypatch.setattr(launching, "USUAL_URL", "http://127.0.0.1:9")
    return arguments


def test_no_service_of_the_demo_is_started_for_an_agent_unless_it_is_named(
    said: Path, started: list[list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('kv-cache-memory = "64MiB"\n')
    for options in ([], ["--set", "kv-cache-memory=1GiB"], ["--config", str(file)]):
        result = CliRunner().invoke(launch, [*options, "claude"])
        assert (result.exit_code, "--serve auto takes one that fits" in result.output) == (1, True)
    assert not started
    assert "would be started" in CliRunner().invoke(launch, ["--serve", "demo", "claude"]).output
    assert started == [["demo", "--max-model-len=32000"]]


def test_a_service_gets_settings_as_its_own_flags(said: Path, started: list[list[str]]) -> None:
    sets = ["kv-cache-memory=12GiB", "served_model_name=a", "served-model-name=b", "enable-prefix-caching=false"]
    options = [word for text in sets for word in ("--set", text)]
    CliRunner().invoke(launch, ["--serve", "demo", *options, "claude"])
    names = ["--served-model-name=a", "--served-model-name=b"]
    flags = ["--kv-cache-memory=12GiB", *names, "--no-enable-prefix-caching"]
    assert started == [["demo", *flags, "--max-model-len=32000"]]
    CliRunner().invoke(launch, ["--serve", "demo", "--set", "max-model-len=9000", "claude"])
    assert started[1] == ["demo", "--max-model-len=9000"]


def test_a_setting_that_is_none_or_wrong_is_refused_before_a_service_starts(
    said: Path, started: list[list[str]]
) -> None:
    result = CliRunner().invoke(launch, ["--serve", "demo", "--set", "kv-cach-memory=1GiB", "claude"])
    assert (result.exit_code, "did you mean kv-cache-memory?" in result.output) == (2, True)
    result = CliRunner().invoke(launch, ["--serve", "demo", "--set", "kv-cache-memory=much", "claude"])
    assert (result.exit_code, "--kv-cache-memory" in result.output) == (1, True)
    assert not started


@pytest.mark.parametrize(("options", "says"), [([], "wants a key"), (["--api-key", "no"], "does not take this key")])
def test_a_keyed_server_at_the_usual_port_is_not_taken_for_none(
    options: list[str], says: str, said: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyed(Handler):
        def do_GET(self) -> None:
            self.answer(401, b'{"error": {"message": "The API key is wrong."}}')

    with local_server(Keyed) as address:
        monkeypatch.setattr(launching, "USUAL_URL", f"http://{address}")
        monkeypatch.setattr(launching, "why_not_own", lambda: None)
        result = CliRunner().invoke(launch, [*options, "claude"])
    assert (result.exit_code, says in result.output) == (1, True)
    assert not started


def test_a_context_that_is_too_small_for_agents_is_said_with_the_flag_that_helps(url: str, said: Path) -> None:
    result = CliRunner().invoke(launch, ["--url", url, "claude"])
    assert "the context has 4,096 tokens, and terminal agents need 32,000" in result.output
    assert "--max-model-len=32000, with kv-cache-memory=SIZE" in result.output


def test_the_environment_is_printed_for_a_shell(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    lines = CliRunner().invoke(launch, ["--url", url, "--print", "claude"]).output.splitlines()
    assert lines[0] == "unset ANTHROPIC_API_KEY"
    assert f"export ANTHROPIC_BASE_URL={url}" in lines
    lines = CliRunner().invoke(launch, ["--url", url, "--print", "continue", "-p"]).output.splitlines()
    (function,) = lines
    file = function.split()[5]
    assert function == f'cn() {{ command cn --config {file} -p "$@"; }}'
    assert json.loads(Path(file).read_text())["models"][0]["apiBase"] == f"{url}/v1"
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    assert Path(file).is_relative_to(tmp_path)


def test_command_and_environment_are_shown_as_json(url: str) -> None:
    shown = json.loads(CliRunner().invoke(launch, ["--url", url, "--config-only", "qwen", "-y"]).output)
    assert shown["command"] == ["qwen", "--auth-type", "openai", "-y"]
    assert shown["environment"]["OPENAI_BASE_URL"] == f"{url}/v1"


def test_an_agent_writes_its_own_settings_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "said"
    program = tmp_path / "cline"
    program.write_text(f'#!/bin/sh\necho "$CLINE_DIR" "$@" >> {said}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run_agent(AGENTS["cline"], str(program), SERVER, ("hi",)) == 0
    (folder, *setup), (same, *asked) = (line.split() for line in said.read_text().splitlines())
    assert setup == ["auth", "openai-compatible", "-k", "k", "-m", "demo", "-b", "http://127.0.0.1:9/v1"]
    assert (same, asked) == (folder, ["hi"])
    assert not Path(folder).exists()


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_is_told_server_model_and_key(name: str, tmp_path: Path) -> None:
    settings = AGENTS[name].settings(SERVER, tmp_path)
    told = json.dumps([settings.arguments, settings.setup, dict(settings.variables), list(settings.files.values())])
    assert "http://127.0.0.1:9" in told
    assert "demo" in told
    assert re.search(r'\W"k\\*"', told)
    assert all(file.is_relative_to(tmp_path) for file in settings.files)


@pytest.mark.parametrize("name", ["codex", "claude", "opencode", "qwen", "continue", "goose", "gptme", "aider"])
def test_agents_with_a_limit_of_their_own_wait_for_first_prompts(name: str, tmp_path: Path) -> None:
    settings = AGENTS[name].settings(SERVER, tmp_path)
    assert "3600" in json.dumps([settings.arguments, dict(settings.variables), list(settings.files.values())])


def test_an_agent_that_is_killed_ends_as_a_shell_tells_it(tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o700)
    assert run_agent(AGENTS["claude"], str(program), SERVER, ()) == 137
