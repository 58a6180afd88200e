"""`moeserve top` of a server that tells its figures."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from launcher.cli import main
from launcher.top import Frame, sparkline
from tests.support.local_http import Handler, local_server

ABOUT = {
    "version": "1.2.3",
    "models": ["m", "alias"],
    "ready": True,
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
}
SAMPLE = {
    "time": 1.0,
    "running": 3,
    "waiting": 1,
    "generation_rate": 71.25,
    "prompt_rate": 100.0,
    "cached_rate": 80.0,
    "step_seconds": 0.042,
    "ttft": {"p50": 0.25, "p95": 1.5},
    "inter_token": None,
    "hit_rate": 0.8,
    "kv": {"free": 10, "cached": 20, "leased": 30},
    "below": [
        {"tier": "host", "blocks": 3, "bytes": 300, "unused_for_s": 8.0, "hit_share": None},
        {"tier": "disk", "blocks": 7, "bytes": 700, "unused_for_s": 90.0, "hit_share": None},
    ],
    "rejections": 2,
    "preemptions": 0,
    "experts": {"balance": 0.5, "resident": 12, "hit_rate": None, "stall_seconds": None, "migrations": 4},
}


def event(name: str, content: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()


class Server(Handler):
    """The first answer has no sample yet."""

    def do_GET(self) -> None:
        if self.headers.get("authorization") != "Bearer prom":
            self.answer(401, json.dumps({"error": {"message": "A valid API key is required"}}).encode())
            return
        assert self.path == "/v1/stats/stream"
        stream = event("stats", {"about": ABOUT, "samples": []}) + b": keep-alive\n\n" + event("sample", SAMPLE)
        self.answer(200, stream)


@pytest.fixture
def address() -> Iterator[str]:
    with local_server(Server) as address:
        yield address


def test_one_frame_tells_all_figures(address: str) -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--url", address, "--api-key", "prom"])
    assert result.exit_code == 0, result.output
    for figure in (
        "moeserve 1.2.3",
        "m · cpu · float32",
        "1 waiting",
        "71.2/s",
        "80.0/s cached",
        "step 42 ms",
        "250 ms",
        "p95 1.50 s",
        "80 %",
        "leased 480",
        "cached 320",
        "free 160",
        "host memory 48",
        "on disk 112",
        "in memory 12",
        "layers placed anew 4",
    ):
        assert figure in result.output


def test_no_value_is_cut_at_80_columns_however_long_the_series_are() -> None:
    sample = {**SAMPLE, "generation_rate": 12345.6, "prompt_rate": 123456.7, "cached_rate": 98765.4}
    for width in (80, 100, 200):
        frame = Frame("http://127.0.0.1:8000", ABOUT, deque([sample] * 300))
        console = Console(width=width, file=StringIO())
        console.print(frame.render(width))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for figure in ("12345.6/s", "123456.7/s", "98765.4/s cached", "step 42 ms", "p95 1.50 s", "between tokens"):
            assert figure in shown, width
        assert "…" not in shown
        assert "█" in shown
        assert max(map(len, shown.splitlines())) <= width


def test_a_long_prompt_shows_how_far_it_is_and_the_latest_one_what_was_cached() -> None:
    prompts = {"requests": 1, "tokens": 21034, "cached": 6016, "left": 12842, "seconds_left": 41.3}
    latest = {"tokens": 21034, "cached": 20812, "seconds": 0.9}
    shown = lines_of({**SAMPLE, "prompts": prompts, "latest_prompt": latest, "saved_seconds": 1560.0})
    assert "computing  8,192 of 21,034 (6,016 cached) · 41 s left" in shown
    assert "last one   20,812 of 21,034 cached · 0.9 s · saved 26 min today" in shown
    assert "of 3 prompts" in "\n".join(lines_of({**SAMPLE, "prompts": {**prompts, "requests": 3}}))


def lines_of(sample: dict[str, Any]) -> list[str]:
    console = Console(width=100, file=StringIO())
    console.print(Frame("http://127.0.0.1:8000", ABOUT, deque([sample])).render(100))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_refusal_is_one_sentence(address: str) -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--url", address])
    assert (result.exit_code, result.stderr) == (1, "Error: A valid API key is required\n")


def test_a_line_of_bars_shows_the_latest_values_against_the_greatest() -> None:
    assert sparkline([None, 0.0, 4.0, 8.0], width=40) == " ▁▄█"
    assert sparkline([8.0, 1.0, 2.0], width=2) == "▄█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""
