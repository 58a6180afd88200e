"""`moeserve experts report` and `trace`: pictures from either kind of file, a trace from a server, plain refusals."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import RoutingTrace, save_statistics, save_trace
from launcher.cli import main
from moeserve.engine.experts.report import count_trace
from tests.support.local_http import Handler, local_server


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    random = np.random.default_rng(0)
    ids = random.random((4, 300, 8)).argsort(axis=2)[..., :2].astype(np.uint16)
    tokens = np.zeros(300, np.int32)
    return RoutingTrace(8, ids, tokens, tokens)


def moeserve(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def is_png(path: str) -> bool:
    return Path(path).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_trace_and_its_statistics_are_drawn(tmp_path: Path, trace: RoutingTrace) -> None:
    save_trace(tmp_path / "trace", trace)
    save_statistics(tmp_path / "statistics", count_trace(trace), "any model")
    for source in ("trace", "statistics"):
        result = moeserve("experts", "report", tmp_path / source, "--out", tmp_path / "pictures" / source)
        assert result.exit_code == 0, result.output
        paths = result.output.split()
        assert [Path(path).name for path in paths] == [
            "experts-load.png",
            "experts-affinity.png",
            "experts-balance.png",
        ]
        assert all(is_png(path) for path in paths)


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path, trace: RoutingTrace, url: str) -> None:
    save_trace(tmp_path / "trace", trace)
    result = moeserve("experts", "report", tmp_path / "trace", "--out", tmp_path / "trace" / "pictures")
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "cannot be written" in result.output
    recorded = moeserve("experts", "trace", "/dev/full", "--url", url, "--api-key", "root", "--max-tokens", "5")
    assert recorded.exit_code == 1
    assert "/dev/full cannot be written (No space left on device)" in recorded.output


def test_every_token_of_a_trace_counts_the_same(trace: RoutingTrace) -> None:
    load = [np.bincount(ids.reshape(-1), minlength=8) for ids in trace.ids]
    np.testing.assert_allclose(count_trace(trace).load(), load, rtol=1e-6)


def test_statistics_of_one_layer_without_any_load_are_drawn(tmp_path: Path) -> None:
    save_statistics(tmp_path / "statistics", RoutingStatistics(StatisticsSpec(1, 3, 1)), "any model")
    result = moeserve("experts", "report", tmp_path / "statistics", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert len(result.output.split()) == 2


@pytest.mark.parametrize(("content", "sentence"), [(None, "There is no file"), (b"torn", "neither statistics nor")])
def test_a_file_that_cannot_be_drawn_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    result = moeserve("experts", "report", tmp_path / "file")
    assert result.exit_code == 1
    assert sentence in result.output


def test_without_matplotlib_the_report_says_what_to_install(
    tmp_path: Path, trace: RoutingTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_trace(tmp_path / "trace", trace)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    result = moeserve("experts", "report", tmp_path / "trace", "--out", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'moeserve[report]'" in result.output


class Server(Handler):
    """A server whose trace is full when it is asked for the second time."""

    asked = 0

    def do_GET(self) -> None:
        Server.asked += 1
        tokens = 5 if Server.asked > 1 else 2
        self.answer(200, json.dumps({"recording": {"trace": {"tokens": tokens, "max_tokens": 5}}}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != "Bearer root":
            self.answer(403, json.dumps({"error": {"message": "This route needs a key"}}).encode())
        elif body["action"] == "start":
            self.answer(200, json.dumps({"status": "recording", "max_tokens": body["max_tokens"]}).encode())
        else:
            self.answer(200, b"the trace")


@pytest.fixture
def url() -> Iterator[str]:
    with local_server(Server) as address:
        yield f"http://{address}"


def test_a_trace_is_fetched_when_it_is_full(tmp_path: Path, url: str) -> None:
    result = moeserve(
        "experts",
        "trace",
        tmp_path / "t",
        "--url",
        url.removeprefix("http://"),
        "--api-key",
        "root",
        "--max-tokens",
        "5",
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "t").read_bytes() == b"the trace"


def test_what_the_server_refuses_is_told(tmp_path: Path, url: str) -> None:
    result = moeserve("experts", "trace", tmp_path / "t", "--url", url)
    assert result.exit_code == 1
    assert "This route needs a key" in result.output
    assert "No server answers" in moeserve("experts", "trace", tmp_path / "t", "--url", "http://127.0.0.1:9").output
    assert "there is no folder" in moeserve("experts", "trace", tmp_path / "no" / "t", "--url", url).output


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    result = moeserve("demo", "build", "--out", tmp_path)
    assert result.exit_code == 1
    assert "no demo model" in result.output
    assert (tmp_path / "letter.txt").exists()
