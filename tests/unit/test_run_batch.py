"""`moeserve run-batch` against a server of few words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from launcher.cli import main
from tests.support.local_http import Handler, local_server

asked: Counter[str] = Counter()


class Server(Handler):
    """Answers with the body's `say`; some words make it refuse, ask for patience, or hang up."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        say = body["say"]
        asked[say] += 1
        if say == "refuse":
            self.answer(400, json.dumps({"error": {"message": "no"}}).encode())
        elif say == "patience" and asked[say] == 1:
            self.send_response(503)
            self.send_header("retry-after", "0")
            self.end_headers()
        elif say == "hang up always" or (say == "hang up" and asked[say] == 1):
            self.close_connection = True
        elif self.headers.get("authorization") == "Bearer wrong":
            self.answer(401, json.dumps({"error": {"message": "A valid API key is required"}}).encode())
        else:
            self.answer(200, json.dumps({"said": say, "path": self.path}, indent=1).encode())


@pytest.fixture
def address() -> Iterator[str]:
    asked.clear()
    with local_server(Server) as address:
        yield address


def line(name: str, say: str, **other: Any) -> str:
    request = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"say": say}}
    return json.dumps({**request, **other}) + "\n"


def run(address: str, folder: Path, text: str | None, *options: str) -> Result:
    if text is not None:
        (folder / "in.jsonl").write_text(text)
    files = [str(folder / "in.jsonl"), str(folder / "out.jsonl")]
    return CliRunner().invoke(main, ["run-batch", *files, "--url", address, *options])


def results(folder: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    found = {result["custom_id"] or result["id"]: result for result in lines}
    assert len(found) == len(lines)
    return found


def test_every_request_has_one_line_of_openais_form(address: str, tmp_path: Path) -> None:
    result = run(address, tmp_path, "".join(line(f"id-{number}", f"word {number}") for number in range(20)))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "20 succeeded, 0 failed" in result.stderr
    found = results(tmp_path)
    assert found["id-7"]["response"]["status_code"] == 200
    assert found["id-7"]["response"]["body"] == {"said": "word 7", "path": "/v1/completions"}
    assert found["id-7"]["error"] is None
    assert found["id-7"]["id"] == "batch_req_8"
    assert set(found["id-7"]) == {"id", "custom_id", "response", "error"}
    assert set(found["id-7"]["response"]) == {"status_code", "request_id", "body"}


def test_a_refusal_is_an_answer_and_fails_the_run(address: str, tmp_path: Path) -> None:
    result = run(address, tmp_path, line("a", "refuse") + line("b", "hello"))
    assert result.exit_code == 1
    found = results(tmp_path)
    assert found["a"]["response"]["status_code"] == 400
    assert found["a"]["response"]["body"] == {"error": {"message": "no"}}
    assert found["b"]["response"]["status_code"] == 200


def test_a_server_that_asks_for_patience_or_hangs_up_once_is_asked_again(address: str, tmp_path: Path) -> None:
    result = run(address, tmp_path, line("a", "patience") + line("b", "hang up"))
    assert result.exit_code == 0, result.stderr
    assert asked == {"patience": 2, "hang up": 2}


def test_a_request_that_is_never_answered_has_an_error(address: str, tmp_path: Path) -> None:
    assert run(address, tmp_path, line("a", "hang up always")).exit_code == 1
    found = results(tmp_path)
    assert found["a"]["response"] is None
    assert found["a"]["error"]["code"] == "no_answer"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "line 1"),
        ("[]", "Expected `object`"),
        ("\xff", "line 1"),
        (line("", "x"), "`custom_id`"),
        (line("a", "x", custom_id=7), "`custom_id`"),
        (line("a", "x", method="GET"), "`method`"),
        (line("a", "x", url="/v1/chat\r\nX-Evil: 1"), "`url`"),
        (line("a", "x", url="http://elsewhere/v1/chat"), "`url`"),
        (line("a", "x", body=None), "`body`"),
        (line("a", "x", body={"stream": True}), "`stream`"),
    ],
)
def test_a_bad_line_has_an_error_line_and_harms_no_other(address: str, tmp_path: Path, text: str, problem: str) -> None:
    for _ in range(2):  # The second time nothing is added.
        result = run(address, tmp_path, text.rstrip("\n") + "\n\n" + line("good", "x"))
        assert result.exit_code == 1
        found = results(tmp_path)
        assert problem in found["batch_req_1"]["error"]["message"]
        assert found["good"]["error"] is None
    assert asked == {"x": 1}


def test_a_custom_id_that_comes_again_is_a_bad_line(address: str, tmp_path: Path) -> None:
    assert run(address, tmp_path, line("a", "one") + line("a", "two")).exit_code == 1
    found = results(tmp_path)
    assert found["a"]["response"]["body"]["said"] == "one"
    assert "'a' is that of an earlier line" in found["batch_req_2"]["error"]["message"]


def test_a_later_run_goes_on_where_the_earlier_one_was_cut_off(address: str, tmp_path: Path) -> None:
    run(address, tmp_path, line("a", "one") + line("b", "two"))
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[:-20])
    cut_off = json.loads(whole.splitlines()[-1])["custom_id"]
    result = run(address, tmp_path, line("a", "one") + line("b", "two") + line("c", "three"))
    assert result.exit_code == 0
    assert "3 succeeded, 0 failed (1 of them before this run)" in result.stderr
    assert set(results(tmp_path)) == {"a", "b", "c"}
    assert asked[{"a": "one", "b": "two"}[cut_off]] == 2
    assert asked.total() == 4


def test_failures_of_an_earlier_run_count(address: str, tmp_path: Path) -> None:
    run(address, tmp_path, line("a", "refuse"))
    assert run(address, tmp_path, None).exit_code == 1
    assert asked == {"refuse": 1}


def test_a_file_that_holds_other_things_is_left_alone(address: str, tmp_path: Path) -> None:
    for content in ("my notes\n", '{"custom_id": "a"}\n', "[1]\n"):
        (tmp_path / "out.jsonl").write_text(content)
        result = run(address, tmp_path, line("a", "one"))
        assert result.exit_code == 1
        assert "holds other things than results (line 1)" in result.stderr
        assert (tmp_path / "out.jsonl").read_text() == content


def test_a_wrong_key_ends_the_run_and_leaves_all_requests_open(address: str, tmp_path: Path) -> None:
    result = run(address, tmp_path, line("a", "one") + line("b", "two"), "--api-key", "wrong")
    assert result.exit_code == 1
    assert result.stderr == "Error: A valid API key is required\n"
    assert results(tmp_path) == {}


def test_a_server_that_is_gone_ends_the_run_and_leaves_all_requests_open(tmp_path: Path) -> None:
    result = run("http://127.0.0.1:1", tmp_path, line("a", "one"))
    assert result.exit_code == 1
    assert "The same command goes on" in result.stderr
    assert results(tmp_path) == {}


def test_settings_of_a_service_need_a_run_without_a_server(address: str, tmp_path: Path) -> None:
    result = run(address, tmp_path, line("a", "one"), "--", "model")
    assert result.exit_code == 2
