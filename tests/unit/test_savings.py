"""What the prefix cache saved while an agent worked, in a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.launch import launch
from launcher.savings import (
    CACHED,
    HITS,
    LATEST_CACHED,
    LATEST_S,
    LATEST_TOKENS,
    PROMPTS,
    SAVED,
    TURNS,
    period,
    summary,
)
from tests.support.local_http import Handler, local_server


def test_a_session_is_the_difference_of_two_looks() -> None:
    before = {TURNS: 2.0, PROMPTS: 1000.0, CACHED: 500.0, HITS: 500.0, SAVED: 60.0}
    after = {TURNS: 45.0, PROMPTS: 831_000.0, CACHED: 812_500.0, HITS: 812_500.0, SAVED: 1620.0}
    assert summary(before, after) == "43 turns, 812,000 of 830,000 prompt tokens cached, which saved about 26 min."


def test_what_others_have_found_cached_is_not_the_keys_saving() -> None:
    after = {TURNS: 1.0, PROMPTS: 200.0, CACHED: 100.0, HITS: 400.0, SAVED: 36.0}
    assert summary({}, after) == "1 turn, 100 of 200 prompt tokens cached, which saved about 9.0 s."


def test_the_latest_prompt_is_told_where_the_metrics_are() -> None:
    latest = {LATEST_S: 0.9, LATEST_TOKENS: 21034.0, LATEST_CACHED: 20812.0}
    assert summary({}, {TURNS: 1.0, PROMPTS: 10.0, **latest}) == (
        "1 turn, 0 of 10 prompt tokens cached; the last prompt took 0.9 s (20,812 of 21,034 cached)."
    )


def test_counters_of_an_engine_that_was_restarted_begin_anew() -> None:
    before = {TURNS: 1.0, PROMPTS: 1000.0, CACHED: 900.0, HITS: 900.0, SAVED: 9.0}
    after = {TURNS: 2.0, PROMPTS: 1200.0, CACHED: 1000.0, HITS: 100.0, SAVED: 3.0}
    assert summary(before, after) == "1 turn, 100 of 200 prompt tokens cached, which saved about 3.0 s."


def test_nothing_is_told_where_no_answer_has_ended() -> None:
    assert summary({TURNS: 10.0}, {TURNS: 10.0}) == ""
    assert summary({}, {}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.94, "0.9 s"), (9.96, "10 s"), (119, "119 s"), (1560, "26 min"), (9000, "2.5 h")]
)
def test_times_are_told_as_people_say_them(seconds: float, text: str) -> None:
    assert period(seconds) == text


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture(params=["all", "usage", "nothing"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """A server whose figures grow with each look, and what of them it tells the key."""
    told, looks = request.param, iter([10, 110])

    class Server(Handler):
        def do_GET(self) -> None:
            if self.path == "/v1/usage":
                total = {TURNS: (look := next(looks)), PROMPTS: 10 * look, CACHED: 9 * look}
                self.answer(404 if told == "nothing" else 200, json.dumps({"data": [{"total": total}]}).encode())
            elif self.path == "/metrics":
                self.answer(200 if told == "all" else 403, f"# HELP x\n{LATEST_S} 2.0\n".encode())
            else:
                model = {"id": "m", "owned_by": "moeserve", "max_model_len": 4096}
                self.answer(200, json.dumps({"data": [model]}).encode())

    with local_server(Server) as address:
        yield f"http://{address}", told


def test_an_agents_end_tells_what_its_key_may_know(server: tuple[str, str], agent: None) -> None:
    url, told = server
    result = CliRunner().invoke(launch, ["--url", url, "claude"])
    assert result.exit_code == 0
    assert ("100 turns, 900 of 1,000 prompt tokens cached" in result.stderr) == (told != "nothing")
    assert ("the last prompt took 2.0 s" in result.stderr) == (told == "all")
