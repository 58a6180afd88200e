"""How decode steps are captured and replayed beside other ranks, in calls: CUDA and the model are stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeserve.model.decoder import ForwardBatch
from moeserve.model.gpu.batches import AttentionLimits, native_limits
from moeserve.model.gpu.model import graphs_of_all_sizes
from moeserve.model.gpu.runner import Computed, DecodeSteps, HeardDecoder
from moeserve.model.gpu.setup import blank_arrays
from moeserve.model.step_arrays import StepArrays, StepShape
from tests.support.checkpoints import spec_of
from tests.support.tiny_models import save

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here is a stand-in")
SIZES = (1, 2, 4)
HIDDEN, VOCAB = 64, 128  # of the tiny models


class Log(list[str]):
    """The calls, and whether each was inside a capture."""

    captures = False

    def decoder(self, batch: ForwardBatch) -> Computed:
        self.append(f"compute {len(batch.token_ids)}{' in a graph' if self.captures else ''}")
        size = len(batch.token_ids)
        return Computed(torch.full((size, HIDDEN), float(size)), torch.full((size, VOCAB), float(size)))


class Peers:
    def __init__(self, log: Log) -> None:
        self._log = log
        self.decode_size: int | None = None

    def begin_alike(self, shape: StepShape) -> None: ...

    def begin_decodes(self, size: int) -> None:
        self.decode_size = size
        self._log.append(f"begin {size}")

    def size_for(self, own: int | None) -> int | None:
        return self.decode_size

    def decoding(self, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for(self, event: torch.cuda.Event) -> None: ...

    def wait_for_device(self) -> None:
        self._log.append("wait")

    @contextmanager
    def recorded(self) -> Iterator[int | None]:
        self._log.append("record")
        yield self.decode_size

    @contextmanager
    def replayed(self, size: int | None) -> Iterator[None]:
        self._log.append(f"enter {size}")
        yield
        self._log.append("mark")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def graph(_: Graph, *, pool: object, stream: object, capture_error_mode: str = "global") -> Iterator[None]:
        log.append(f"capture {capture_error_mode}")
        log.captures = True
        yield
        log.captures = False

    @contextmanager
    def stream_of(_: object) -> Iterator[None]:
        yield

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": object,
        "Stream": lambda: stream,
        "stream": stream_of,
        "current_stream": lambda: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return log


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> AttentionLimits:
    folder: Path = tmp_path_factory.mktemp("model")
    save("mixtral", folder)
    return native_limits(spec_of(folder), 4, 32, torch.float32, torch.device("cpu"))


def decode_steps(log: Log, limits: AttentionLimits, peers: Peers | None) -> DecodeSteps:
    return DecodeSteps(cast("HeardDecoder", log.decoder), limits, SIZES, cast("Any", peers))


def test_ranks_capture_every_size_in_step_after_what_connects_them(log: Log, limits: AttentionLimits) -> None:
    decode_steps(log, limits, Peers(log)).capture()
    expected = []
    for size in reversed(SIZES):
        expected += [f"begin {size}", *[f"compute {size}"] * 2, "wait", "record", "capture thread_local"]
        expected.append(f"compute {size} in a graph")
    assert log == expected


def test_one_gpu_tells_nobody(log: Log, limits: AttentionLimits) -> None:
    steps = decode_steps(log, limits, None)
    steps.capture()
    assert log[:4] == ["compute 4", "compute 4", "capture global", "compute 4 in a graph"]
    log.clear()
    steps.run(blank_arrays(StepShape(3, (), 3), 4, 50), None, 4)
    assert log == ["replay"]


@pytest.mark.parametrize("num_rows", [0, 1, 3, 4], ids=lambda count: f"{count} rows")
def test_a_replay_is_entered_launched_and_marked_whatever_rows_this_rank_has(
    num_rows: int, log: Log, limits: AttentionLimits
) -> None:
    peers = Peers(log)
    steps = decode_steps(log, limits, peers)
    steps.capture()
    peers.begin_decodes(4)
    log.clear()
    arrays = blank_arrays(StepShape(num_rows, (), num_rows), 4, 50) if num_rows else StepArrays()
    assert steps.size_of(arrays, num_rows) == 4
    assert len(steps.run(arrays, None, 4).states) == num_rows
    assert log == ["enter 4", "replay", "mark"]


def test_a_step_is_this_ranks_own_if_the_ranks_say_so(log: Log, limits: AttentionLimits) -> None:
    peers = Peers(log)
    steps = decode_steps(log, limits, peers)
    assert steps.size_of(blank_arrays(StepShape(2, (), 2), 4, 50), 2) is None


def test_without_graphs_batches_are_computed_where_they_lie(log: Log, limits: AttentionLimits) -> None:
    peers = Peers(log)
    steps = decode_steps(log, limits, peers)
    steps.capture()
    steps.release()
    peers.begin_decodes(2)
    log.clear()
    steps.run(StepArrays(), None, 2)
    assert log == ["compute 2"]


def test_graphs_of_all_sizes_write_one_set_of_outputs(log: Log, limits: AttentionLimits) -> None:
    steps = decode_steps(log, limits, None)
    outputs = [steps.run(blank_arrays(StepShape(size, (), size), 4, 50), None, size) for size in SIZES]
    assert len({computed.states.data_ptr() for computed in outputs}) == 1
    assert len({computed.logits.data_ptr() for computed in outputs if computed.logits is not None}) == 1
    largest = outputs[-1]
    assert largest.logits is not None
    assert largest.logits.shape == (4, VOCAB)
    assert bool((largest.logits == 4).all())


def test_graphs_share_what_the_largest_computes_in_and_each_has_nodes_of_its_own() -> None:
    assert graphs_of_all_sizes(used_bytes=130, pool_bytes=100, num_sizes=10) == 100 + 10 * 30
    assert graphs_of_all_sizes(used_bytes=90, pool_bytes=100, num_sizes=10) == 100
