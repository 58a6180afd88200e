"""Models with states on transformers' code: the whole engine writes the bits that each request gets alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.token_engine import Completion, TokenEngine
from kernels.ops import CpuOps
from moeserve.model.hf.check import choose_ways
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.mixers import Ways
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.scheduling.request_states import StatePolicy
from tests.support.llm_prompts import (
    BASE,
    assert_same,
    assert_same_cold_and_cached,
    complete_alone,
    complete_at_every_border,
)
from tests.support.tiny_transformers import save_tiny
from tests.support.transformers_parity import TOLERANCE, Memory, worst_difference

THEIRS = replace(BASE, model_impl="transformers")


@pytest.fixture(
    scope="module",
    params=[
        "kimi_linear",
        "nemotron_h",
        "lfm2_moe",
        pytest.param("jamba", marks=pytest.mark.long),
    ],
)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    return complete_alone(model_dir, config=THEIRS)


@pytest.mark.parametrize("changes", [{"max_num_seqs": 3, "max_num_batched_tokens": 5}, {"max_num_batched_tokens": 256}])
def test_hybrids_give_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    model_dir: Path, alone: list[Completion], changes: dict[str, int]
) -> None:
    llm = TokenEngine(model_dir, replace(THEIRS, **changes))  # type: ignore[arg-type]
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100


def test_on_transformers_code_a_hit_at_every_block_border_gives_the_same_bits(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the policy stands, a snapshot is saved only where it spares many tokens.
    monkeypatch.setattr("moeserve.engine.planner.StatePolicy", partial(StatePolicy, min_gain=1))
    hits, alone = complete_at_every_border(model_dir, THEIRS)
    assert_same(hits, alone)


@pytest.mark.parametrize("model_type", ["kimi_linear", "nemotron_h", "lfm2_moe", "jamba"])
def test_the_states_of_a_layer_are_the_same_bits_in_any_chunking(model_type: str, tmp_path: Path) -> None:
    save_tiny(model_type, tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    decoder.use(Ways())
    texts = [list(range(3, 43)), list(range(60, 90))]
    whole, pieces = Memory(decoder, texts), Memory(decoder, texts)
    whole.step([(0, 0, 40), (1, 0, 30)])
    for step in ([(0, 0, 3)], [(1, 0, 29), (0, 3, 4)], [(0, 4, 21), (1, 29, 30)], [(0, 21, 40)]):
        pieces.step(step)
    assert_first_layer_is_equal(decoder.spec.state_layers[0], whole.states, pieces.states)


@pytest.mark.parametrize("answer", [NotImplementedError("another form"), None])
def test_states_go_back_to_transformers_where_our_kernels_refuse_them_or_are_wrong(
    answer: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(self: CpuOps, xbc: Tensor, *_: object) -> Tensor:
        if answer is not None:
            raise answer
        return xbc.new_zeros((len(xbc), 8, 16))

    monkeypatch.setattr(CpuOps, "mamba2_scan", scan)
    own = save_tiny("nemotron_h", tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    assert not choose_ways(decoder).scans
    assert decoder.num_mixers == (1, 2)
    assert worst_difference(own, decoder) < TOLERANCE


def assert_first_layer_is_equal(layer: tuple[object, ...], left: list[Tensor], right: list[Tensor]) -> None:
    for one, other in list(zip(left, right, strict=True))[: len(layer)]:
        assert bool(one[:2].any())
        assert torch.equal(one, other)
