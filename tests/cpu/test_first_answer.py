"""Weights that load but compute nothing are found before the service is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.engine.assemble import check_first_answer
from moeserve.model.kv_pool import KVPool
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import CheckpointError
from moeserve.plan import ChunkResult, Computed, StepPlan, StepResult
from tests.support.checkpoints import change_tensors, load
from tests.support.tiny_models import save


def runner_of(folder: Path) -> ModelRunner:
    decoder = load(folder)
    return ModelRunner(decoder, KVPool(decoder.spec.kv_layers, 8, 4, torch.float32))


def _one_nan_in_the_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][5, 7] = torch.nan


def _all_nan(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def _infinite_layer(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"].fill_(torch.inf)


@pytest.mark.parametrize("damage", [_one_nan_in_the_head, _all_nan, _infinite_layer])
def test_weights_that_compute_no_numbers_are_refused_in_the_warm_up(
    damage: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    save("mixtral", tmp_path)
    change_tensors(tmp_path, damage)
    runner = runner_of(tmp_path)
    for only_size in (None, 1, 16):
        with pytest.raises(CheckpointError, match="not finite"):
            runner.warm_up(16, only_size=only_size)
    with pytest.raises(CheckpointError, match="not finite"):
        check_first_answer(runner, 128, 4)


def test_sound_weights_pass(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    runner = runner_of(tmp_path)
    measured = runner.warm_up(16)
    assert [count for count, _ in measured] == [1, 2, 4, 8, 16]
    assert all(seconds > 0 for _, seconds in measured)
    check_first_answer(runner, 128, 4)


def test_all_steps_of_the_warm_up_are_computed_for_ranks_that_wait(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    change_tensors(tmp_path, _all_nan)
    begun: list[int] = []
    with pytest.raises(CheckpointError):
        runner_of(tmp_path).warm_up(16, begun.append)
    assert begun == [1, 2, 4, 8, 16]


def test_the_first_prompt_fits_a_tiny_vocabulary_and_one_block() -> None:
    class Runner:
        def launch(self, plan: StepPlan) -> Computed[StepResult]:
            assert list(plan.chunks[0].token_ids) == [0, 1, 0, 1]
            assert list(plan.chunks[0].block_table) == [0]
            return Computed(StepResult(plan.step, [ChunkResult(token_id=1)]))

    runner: Any = Runner()
    check_first_answer(runner, 2, 16)
