"""`moeserve chat` as a script uses it, against a server that says few things."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from tests.support.local_http import Handler, local_server


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
