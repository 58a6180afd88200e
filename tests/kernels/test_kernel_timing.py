"""How calls are timed, on a made-up device whose clock the calls move."""

import contextlib

import pytest
import torch

from benchmarks.kernels.measure import time_calls


class Device:
    """Calls take time on it when they run; while a graph is captured they are only recorded."""

    def __init__(self):
        self.now, self.capturing, self.forbids_waiting = 0.0, None, False
        self.order, self.stream = [], "main"

    def call(self, name, milliseconds, *, waits=False, captured=True):
        def run():
            if waits and (self.forbids_waiting or self.capturing is not None):
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.capturing is not None:
                if not captured:
                    raise RuntimeError("operation not permitted when stream is capturing")
                self.capturing.append(run)
                return
            self.order.append(name)
            self.now += milliseconds

        return run


@pytest.fixture
def gpu(monkeypatch):
    device = Device()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.time = device.now

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.time - self.time

    class Graph:
        def replay(self):
            device.order.append("replay")
            for run in self.calls:
                run()

    class Stream(str):
        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def capture(graph, **options):
        # As torch does: where capturing fails its stream stays the current one.
        device.stream, device.capturing = "capture", []
        yield
        graph.calls, device.capturing, device.stream = device.capturing, None, "main"

    def set_stream(stream):
        device.stream, device.capturing = stream, None

    fakes = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": lambda: Stream(device.stream),
        "graph": capture,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "set_stream": set_stream,
        "set_sync_debug_mode": lambda mode: setattr(device, "forbids_waiting", mode == "error"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    return device


def replays(device):
    """Return the names of the calls that were replayed."""
    names, parts = [], " ".join(device.order).split("replay")
    for part in parts[1:]:
        names.append("".join(dict.fromkeys(part.split())))
    return "".join(names)


def test_times_are_of_single_calls_in_a_graph_of_at_least_ten(gpu):
    (found,) = time_calls([gpu.call("a", 2.0), gpu.call("b", 4.0), gpu.call("c", 6.0)])
    assert found.microseconds == pytest.approx(4000.0)
    assert found.spread == pytest.approx(0.0)
    assert found.in_graph
    assert gpu.order.count("a") % 4 == 2, "twice before, then four times per replay"


def test_groups_take_turns_and_the_first_changes(gpu):
    own, peer = time_calls([gpu.call("a", 20.0)], [gpu.call("b", 40.0)])
    assert (own.microseconds, peer.microseconds) == (pytest.approx(20000.0), pytest.approx(40000.0))
    # Once each to know how long they take.
    assert replays(gpu).startswith("ab" + "abba" * 2)


def test_calls_that_wait_for_the_device_are_timed_without_a_graph(gpu):
    own, peer = time_calls([gpu.call("a", 1.0)], [gpu.call("b", 3.0, waits=True)])
    assert own.in_graph
    assert not peer.in_graph
    assert peer.microseconds == pytest.approx(3000.0)
    assert gpu.stream == "main"
    assert not gpu.forbids_waiting


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu):
    (found,) = time_calls([gpu.call("a", 1.0, captured=False)])
    assert not found.in_graph
    assert found.microseconds == pytest.approx(1000.0)
    assert gpu.stream == "main"
