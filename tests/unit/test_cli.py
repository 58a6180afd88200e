"""The command line as a user types it, and a conversation with a server."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.chat import prompt_line
from launcher.cli import main
from moeserve.config import VERSION
from tests.support.forking import popen
from tests.support.local_http import Handler, local_server

ROOT = Path(__file__).resolve().parents[2]


def moeserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.cli", *arguments]
    variables = {**os.environ, **environment}
    with popen(
        command, torch=False, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def test_version_names_moeserve_and_torch():
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert f"moeserve {VERSION}\n" in result.output
    assert "torch 2" in result.output


def test_the_version_is_an_option_too():
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"moeserve {VERSION}\n")


def test_help_shows_the_usual_settings_alone_and_where_the_others_are():
    result = CliRunner().invoke(main, ["serve", "--help"])
    shown = re.findall(r"^  (?:-h, )?(--[a-z-]+)", result.output, re.MULTILINE)
    assert {"--kv-cache-memory", "--port", "--help", "--help-all"} < set(shown)
    assert len(shown) < 20
    assert "owner/name:Q4_K_M" in result.output


def test_all_help_lists_settings_under_headings_and_names_their_variables():
    result = CliRunner().invoke(main, ["serve", "--help-all"])
    assert result.exit_code == 0
    headings = [line for line in result.output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == [
        "Model:",
        "Several ranks:",
        "Experts:",
        "Several nodes:",
        "Memory and scheduling:",
        "Expert memory:",
        "HTTP:",
        "Operation:",
        "Other:",
    ]
    assert "MOESERVE_KV_CACHE_MEMORY" in result.output
    assert "--no-enable-prefix-caching" in result.output


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom launcher.cli import main\n"
        "assert CliRunner().invoke(main, ['serve', '--help']).exit_code == 0\n"
        "print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--port", "high"], {}, "--port: 'high' is not a whole number"),
        ([], {"MOESERVE_DTYPE": "int3"}, "MOESERVE_DTYPE: 'int3' is not one of"),
        (["--config", "none.toml"], {}, "cannot read none.toml"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_two(arguments, environment, sentence):
    result = moeserve("serve", *arguments, **environment)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_listening_beyond_loopback_without_a_key_is_warned_about(tmp_path):
    result = moeserve("serve", "--host", "0.0.0.0", "--port", "0", str(tmp_path / "none"))
    assert "Warning: 0.0.0.0 is reachable from other machines" in result.stderr


def test_a_key_silences_the_warning(tmp_path):
    result = moeserve("serve", "--host", "0.0.0.0", "--port", "0", str(tmp_path / "none"), MOESERVE_API_KEY="k")
    assert "Warning" not in result.stderr


def test_another_system_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    result = CliRunner().invoke(main, ["serve"])
    assert result.exit_code == 1
    assert "moeserve runs on Linux only; this is darwin" in result.stderr


def test_how_far_a_prompt_is_is_told_with_the_time_that_it_still_takes() -> None:
    progress = {"total": 21034, "cache": 6016, "processed": 8192, "time_ms": 7900}
    assert prompt_line({**progress, "left_ms": 41250}) == "8,192 of 21,034 (6,016 cached) · 41 s left"
    assert prompt_line(progress) == "8,192 of 21,034 (6,016 cached)"  # of a server that is llama.cpp


class Server(Handler):
    """Answers with the number of messages it was sent, and knows one model."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] != "tiny":
            self.answer(404, json.dumps({"error": {"message": "The model does not exist"}}).encode())
            return
        pieces = [f"{len(body['messages'])} ", "messages"]
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        self.answer(200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))


@pytest.fixture
def address() -> Iterator[str]:
    with local_server(Server) as address:
        yield address


def chat(*arguments: str, lines: str) -> Result:
    return CliRunner().invoke(main, ["chat", *arguments], input=lines)


def test_a_conversation_grows_until_it_is_reset(address: str) -> None:
    result = chat("--url", f"http://{address}/v1", "--system", "be short", lines="a\nb\n/reset\nc\n/exit\nd\n")
    assert (result.exit_code, result.stdout) == (0, "2 messages\n4 messages\n2 messages\n")


def test_an_address_needs_no_scheme(address: str) -> None:
    assert chat("--url", address, lines="a\n").stdout == "1 messages\n"


def test_a_script_is_told_of_a_refusal_by_the_exit_code(address: str) -> None:
    result = chat("--url", address, "--model", "x", lines="a\nb\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: The model does not exist\n"


def test_nobody_there_is_one_sentence() -> None:
    result = chat("--url", "http://127.0.0.1:1", lines="a\n")
    assert result.exit_code == 1
    assert "start one with `moeserve serve`" in result.stderr


class Slow(Handler):
    """Tells how far a prompt is before it answers."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self) -> None:
        assert json.loads(self.rfile.read(int(self.headers["content-length"])))["return_progress"]
        progress = {"total": 21034, "cache": 6016, "processed": 8192, "time_ms": 7900, "left_ms": 41250}
        choice = {"index": 0, "delta": {}, "finish_reason": None}
        events = [
            {"choices": [choice], "prompt_progress": progress},
            {"choices": [{**choice, "delta": {"content": "Hello"}}]},
        ]
        self.answer(200, b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))


def test_on_a_terminal_a_long_prompt_shows_how_far_it_is_until_the_answer_begins() -> None:
    with local_server(Slow) as address:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm"
            os.execv(sys.executable, [sys.executable, "-m", "launcher.cli", "chat", "--url", address])
        shown = b""
        os.write(terminal, b"hi\n/exit\n")
        while True:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    text = shown.decode()
    assert text.index("8,192 of 21,034 (6,016 cached) · 41 s left") < text.index("Hello")
