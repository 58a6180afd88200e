"""The GPU's decoder gives transformers' logits, for every kind of model, through paged memory full of NaN."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.gpu.attention_tuning import AttentionConfigs
from moeserve.cuda.attention_kernels import attention_shape
from moeserve.cuda.batches import AttentionLimits, StepBatches
from moeserve.cuda.build import build_gpu_decoder
from moeserve.cuda.step_arrays import step_arrays
from moeserve.kv_pool import KVPool
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.plan import Chunk
from tests.support.tiny_models import CASES, save

BLOCK_SIZE = 4
NUM_BLOCKS = 16
# Between them all kinds of attention, norms, rotation, gates and activations.
FEW = ("qwen3_moe", "gpt_oss", "deepseek_v3-yarn", "olmoe")


@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_logits_equal_those_of_transformers(case: str, device: torch.device, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    generator = torch.Generator().manual_seed(2)
    requests = [torch.randint(1, 128, (length,), generator=generator).tolist() for length in (9, 5)]
    with torch.no_grad():
        expected = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in requests]
    spec = build_spec(load_config(tmp_path))
    decoder = build_gpu_decoder(tmp_path, spec, dtype=torch.float32, device=device, max_tokens=16, max_model_len=32)
    shape = attention_shape(spec, BLOCK_SIZE, torch.float32)
    # Prompts of five and three tokens are computed otherwise than those of one and two.
    tuned = AttentionConfigs(shape, {"extend": replace(shape.extend(), max_query_len=2)})
    batches = StepBatches(AttentionLimits(spec, BLOCK_SIZE, 32, torch.float32, device, tuned), max_seqs=4)
    pools = KVPool(spec.kv_layers, NUM_BLOCKS, BLOCK_SIZE, torch.float32, device)
    for pair in pools.layers:
        for pool in pair:
            if pool is not None:
                pool.fill_(torch.nan)
    blocks = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(blocks)
    tables = [array("i", [blocks.pop() for _ in range(3)]) for _ in requests]
    found = [torch.full_like(logits, torch.nan) for logits in expected]
    # A prompt, then prompts of both in chunks, then a decode beside a prompt, then both decode.
    for step in ([(0, 0, 5)], [(0, 5, 7), (1, 0, 3)], [(0, 7, 8), (1, 3, 4)], [(0, 8, 9), (1, 4, 5)]):
        chunks = [Chunk(str(r), array("i", requests[r][start:end]), start, tables[r], None) for r, start, end in step]
        arrays = step_arrays(chunks, BLOCK_SIZE)
        with torch.inference_mode():
            batch = batches.make(arrays, range(arrays.num_rows), None)
            logits = decoder.forward(batch, pools.layers).cpu()
        row = 0
        for request, start, end in step:
            found[request][start:end] = logits[row : row + end - start]
            row += end - start
    difference = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    scale = max(logits.abs().max().item() for logits in expected)
    assert difference <= 1e-4 * max(1.0, scale), f"{difference:.1e} of {scale:.1f}"
