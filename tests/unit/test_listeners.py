"""Commands tell whose server it is that listens on this machine before they give it a key."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from launcher import server_client
from launcher.chat import chat
from launcher.top import top
from moeserve.bench import serve as bench
from moeserve.listeners import why_not_own

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LOOPBACK, ANY, ELSEWHERE = "0100007F", "00000000", "0501A8C0"
ANY_6, MAPPED = "0" * 32, "0000000000000000FFFF00000100007F"
STRANGER = os.geteuid() + 1


def table(tmp_path: Path, *rows: tuple[str, int, str, int]) -> Sequence[Path]:
    """rows: address, port, state and user id."""
    path = tmp_path / "tcp"
    lines = [
        f"   0: {a}:{p:04X} 00000000:0000 {s} 00000000:00000000 00:00000000 00000000 {u:5} 0 1667 1\n"
        for a, p, s, u in rows
    ]
    path.write_text("".join([HEAD, *lines]))
    return [path, tmp_path / "none"]


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
def test_a_server_of_this_user_is_its_own(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind((address, 0))
        except OSError:
            pytest.skip("There is no IPv6.")
        port = listening.getsockname()[1]
        assert "No server" in (why_not_own(port) or "")
        listening.listen()
        assert why_not_own(port) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="Only root can be another user.")
def test_a_server_of_another_user_is_refused_in_a_sentence_that_says_what_to_do() -> None:
    os.seteuid(65534)
    try:
        listening = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(0)
    with listening:
        port = listening.getsockname()[1]
        found = why_not_own(port)
    url = f"http://127.0.0.1:{port}"
    assert found == f"The server at {url} is another user's: if it is to get your prompts and key, say --url {url}."


@pytest.mark.skipif(sys.byteorder != "little", reason="Addresses are written in the machine's order of bytes.")
@pytest.mark.parametrize(
    ("rows", "is_own"),
    [
        ([(LOOPBACK, 8000, "0A", os.geteuid())], True),
        ([(LOOPBACK, 8000, "0A", 0)], True),
        ([(LOOPBACK, 8000, "0A", STRANGER)], False),
        ([(ANY, 8000, "0A", STRANGER)], False),
        ([(ANY_6, 8000, "0A", STRANGER)], False),
        ([(MAPPED, 8000, "0A", STRANGER)], False),
        ([(LOOPBACK, 8000, "0A", os.geteuid()), (ANY_6, 8000, "0A", STRANGER)], False),
        ([(LOOPBACK, 8000, "0A", os.geteuid()), (ELSEWHERE, 8000, "0A", STRANGER)], True),
        ([(LOOPBACK, 8000, "0A", os.geteuid()), (LOOPBACK, 8001, "0A", STRANGER)], True),
        ([(LOOPBACK, 8000, "01", os.geteuid())], False),
        ([], False),
    ],
)
def test_all_sockets_that_a_connection_may_reach_count(
    rows: list[tuple[str, int, str, int]], is_own: bool, tmp_path: Path
) -> None:
    assert (why_not_own(8000, table(tmp_path, *rows)) is None) is is_own


@pytest.mark.parametrize("command", [chat, top, bench.command])
def test_a_command_without_an_address_asks_no_server_of_another_user(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (server_client, bench):
        monkeypatch.setattr(module, "why_not_own", lambda: "It is another user's.")
    result = CliRunner().invoke(command, [], env={"MOESERVE_API_KEY": "secret"})
    assert (result.exit_code, result.output) == (1, "Error: It is another user's.\n")
    named = CliRunner().invoke(command, ["--url", "http://127.0.0.1:9", "--help"])
    assert named.exit_code == 0
