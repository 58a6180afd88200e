"""What the prefix cache saved while an agent worked, in a sentence."""

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from launcher.launch import launch
from launcher.savings import period, summary
from tests.support.local_http import Handler, local_server

PROMPTS, HITS = "moeserve_prompt_tokens_total", "moeserve_prefix_cache_hits_total"
SAVED = "moeserve_prompt_seconds_saved_total"


def test_a_session_is_the_difference_of_two_looks() -> None:
    before = {PROMPTS: 1000.0, HITS: 500.0, SAVED: 60.0}
    after = {PROMPTS: 831_000.0, HITS: 812_500.0, SAVED: 1620.0}
    assert summary(before, after) == "812,000 of 830,000 prompt tokens were cached, which saved about 26 min."


def test_the_latest_prompt_is_told_too() -> None:
    latest = {
        "moeserve_latest_prompt_seconds": 0.9,
        'moeserve_latest_prompt_tokens{state="total"}': 21034.0,
        'moeserve_latest_prompt_tokens{state="cached"}': 20812.0,
    }
    assert summary({}, {PROMPTS: 10.0, **latest}) == (
        "0 of 10 prompt tokens were cached; the last prompt took 0.9 s (20,812 of 21,034 cached)."
    )


def test_counters_of_an_engine_that_was_restarted_begin_anew() -> None:
    sentence = summary({PROMPTS: 1000.0, HITS: 900.0, SAVED: 9.0}, {PROMPTS: 200.0, HITS: 100.0, SAVED: 3.0})
    assert sentence == "100 of 200 prompt tokens were cached, which saved about 3.0 s."


def test_nothing_is_told_where_nothing_was_asked() -> None:
    assert summary({PROMPTS: 10.0}, {PROMPTS: 10.0}) == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.94, "0.9 s"), (9.96, "10 s"), (119, "119 s"), (1560, "26 min"), (9000, "2.5 h")]
)
def test_times_are_told_as_people_say_them(seconds: float, text: str) -> None:
    assert period(seconds) == text


@pytest.fixture
def agent(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.fixture(params=[200, 403])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A server whose metrics grow with each look, or are not for this key; with the status of its answer."""
    looks = iter([10, 110])

    class Server(Handler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(request.param, f"# HELP x\n{PROMPTS} {next(looks)}.0\n".encode())
            else:
                model = {"id": "m", "owned_by": "moeserve", "max_model_len": 4096}
                self.answer(200, json.dumps({"data": [model]}).encode())

    with local_server(Server) as address:
        yield f"http://{address}", request.param


def test_an_agents_end_tells_what_was_cached_to_a_key_that_may_know(server: tuple[str, int], agent: None) -> None:
    url, status = server
    result = CliRunner().invoke(launch, ["--url", url, "claude"])
    assert result.exit_code == 0
    assert ("0 of 100 prompt tokens were cached." in result.stderr) == (status == 200)
