"""Recurrent states in their pool, and a runner that follows plans with slots and snapshots."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
import transformers

from moeserve.engine.assemble import check_first_answer
from moeserve.model.families import build_spec
from moeserve.model.kv_pool import KVPool
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import StateShape
from moeserve.model.state_pool import StatePool, state_row_bytes
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StateUse, StepPlan
from tests.support.checkpoints import load
from tests.support.tiny_models import save

LAYER = (StateShape((3, 5), keep_fp32=False), StateShape((2, 4, 7), keep_fp32=True))
BLOCK = 4
SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
PROMPT = [int(token) for token in torch.randint(1, 128, (22,), generator=torch.Generator().manual_seed(4))]


def chunk(start: int, state: StateUse) -> Chunk:
    return Chunk("", array("i", [1]), start, array("i", [0]), None, state=state)


def test_states_are_views_of_one_row_of_bytes_with_their_own_dtypes() -> None:
    pool = StatePool([LAYER, LAYER], 3, torch.bfloat16)
    assert state_row_bytes([LAYER, LAYER], torch.bfloat16) == 2 * (64 + 256)
    for number, (conv, matrix) in enumerate(pool.layers):
        assert (conv.dtype, matrix.dtype) == (torch.bfloat16, torch.float32)
        assert (conv.shape, matrix.shape) == ((3, 3, 5), (3, 2, 4, 7))
        conv.fill_(number + 1)
        matrix.fill_(-number - 1)
    for number, (conv, matrix) in enumerate(pool.layers):
        assert bool((conv == number + 1).all())
        assert bool((matrix == -number - 1).all())


@pytest.mark.parametrize(
    ("config", "mebibytes"), [("Qwen3NextConfig", 73.6875), ("Qwen3_5MoeTextConfig", 61.40625)], ids=["80B", "35B"]
)
def test_a_state_of_a_published_model_takes_so_many_mebibytes(config: str, mebibytes: float) -> None:
    spec = build_spec(getattr(transformers, config)().to_dict())
    assert state_row_bytes(spec.state_layers, torch.bfloat16) == mebibytes * 2**20


def test_a_chunk_starts_from_zeros_from_its_slot_or_from_a_snapshot_and_leaves_one() -> None:
    pool = StatePool([LAYER], 5, torch.float32)
    _, matrix = pool.layers[0]
    for row in range(5):
        matrix[row] = row + 1
    chunks = [chunk(0, StateUse(0)), chunk(8, StateUse(1)), chunk(4, StateUse(2, load=4, save=3))]
    pool.begin(chunks)
    assert matrix[:, 0, 0, 0].tolist() == [0, 2, 5, 4, 5]
    matrix[2] += 1
    pool.end(chunks)
    assert matrix[:, 0, 0, 0].tolist() == [0, 2, 6, 6, 5]


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_moe_text"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    decoder = load(folder)
    spec = decoder.spec
    runner = ModelRunner(
        decoder,
        KVPool(spec.kv_layers, 32, BLOCK, torch.float32),
        state_pool=StatePool(spec.state_layers, 8, torch.float32),
    )
    runner.warm_up(16)
    return runner


def compute(runner: ModelRunner, *parts: tuple[int, int, int, StateUse]) -> list[ChunkResult]:
    """One step of parts (first block of the request, start, end, state), sampled where a part ends the prompt."""
    chunks = [
        Chunk(
            str(first),
            array("i", PROMPT[start:end]),
            start,
            array("i", range(first, first + 6)),
            SAMPLED if end == len(PROMPT) else None,
            state=state,
        )
        for first, start, end, state in parts
    ]
    return runner.launch(StepPlan(0, chunks)).result().chunks


def test_the_first_answer_of_start_up_names_a_slot(runner: ModelRunner) -> None:
    check_first_answer(runner, 128, BLOCK, StateUse(3))


def test_a_request_that_resumes_from_a_snapshot_samples_with_the_same_bits(runner: ModelRunner) -> None:
    (cold,) = compute(runner, (0, 0, 22, StateUse(0)))
    # The same prompt in other blocks, in chunks, beside another request; it leaves a snapshot at every block border.
    for block in range(5):
        start, end = block * BLOCK, (block + 1) * BLOCK
        state = StateUse(1, load=5 if block == 3 else None, save=3 + block % 4)
        compute(runner, (10, start, end, state), (20, start, end, StateUse(2)))
        if block == 2:
            # Somebody else takes the slot: the request goes on from its snapshot.
            compute(runner, (0, 0, 7, StateUse(1)))
            (resumed,) = compute(runner, (10, 12, 22, StateUse(7, load=5)))
            assert resumed == cold
    (last,) = compute(runner, (10, 20, 22, StateUse(0, load=3)))
    assert last == cold
