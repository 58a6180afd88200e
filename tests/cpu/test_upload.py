"""Weights go to a device through two buffers, one of which is filled while the other is copied."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.transfer import Upload
from moeserve.model.checkpoint import plan_weights, read_index
from moeserve.model.tensor_reader import TensorReader
from tests.support.checkpoints import spec_of
from tests.support.tiny_models import build

CPU = torch.device("cpu")


class LateQueue:
    """A queue that copies nothing before somebody waits for it."""

    def __init__(self) -> None:
        self._queued: deque[tuple[Tensor, Tensor]] = deque()
        self._passed = self._marked = 0
        self.most_queued = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._queued.append((source, target))
        self.most_queued = max(self.most_queued, len(self._queued))

    def mark(self) -> int:
        self._marked += 1
        return self._marked

    def wait(self, mark: int) -> None:
        while self._passed < mark:
            source, target = self._queued.popleft()
            target.copy_(source)
            self._passed += 1


@pytest.mark.parametrize("size", [1, 8, 15, 16, 17, 100])
def test_a_buffer_is_not_filled_before_what_was_in_it_is_copied(size: int) -> None:
    queue = LateQueue()
    upload = Upload(CPU, queue, num_bytes=16)
    first, second = torch.arange(size, dtype=torch.int16), torch.randn(3, 5).bfloat16().T
    found = [upload(values) for values in (first, second, first[:0], torch.tensor(7.0))]
    queue.wait(queue.mark() - 1)
    assert [values.dtype for values in found] == [torch.int16, torch.bfloat16, torch.int16, torch.float32]
    assert torch.equal(found[0], first)
    assert torch.equal(found[1], second)
    assert (found[2].shape, found[3].item()) == ((0,), 7.0)
    assert queue.most_queued == 2


def test_values_that_are_on_a_device_stay_there() -> None:
    values = torch.empty(3, device="meta")
    assert Upload(CPU, LateQueue(), num_bytes=16)(values) is values


def test_several_threads_read_experts_at_once_with_the_bits_of_one(tmp_path: Path) -> None:
    build("mixtral", num_local_experts=8).save_pretrained(tmp_path, max_shard_size="50KB")
    spec, index = spec_of(tmp_path), read_index(tmp_path)
    plan = plan_weights(spec, index)
    stored = [tensor for layer in plan.layers for tensor in layer.tensors.values()] * 8
    told: list[int] = []
    with TensorReader(index, plan.num_bytes, progress=lambda done, _: told.append(done)) as reader:
        wanted = [reader.read(tensor, torch.float32) for tensor in stored]
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda tensor: reader.read(tensor, torch.float32), stored))
    assert all(map(torch.equal, found, wanted))
    assert told == sorted(told)
    assert told[-1] == 2 * told[len(stored) - 1]
