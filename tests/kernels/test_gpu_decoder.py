"""The GPU's decoder gives transformers' logits, for every kind of model, through paged memory full of NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeserve.model.families import build_spec, load_config
from tests.support.gpu_decoder import build_gpu_decoder
from tests.support.gpu_logits import MAX_LEN, MAX_TOKENS, difference, gpu_logits, two_requests
from tests.support.tiny_models import CASES, save

# Between them all kinds of attention, norms, rotation, gates and activations.
DUE = {"qwen3_moe", "gpt_oss", "deepseek_v3-yarn", "olmoe", "qwen3_next-recurrent-end"}
# Others are computed on a CPU only.
ON_CPUS = ("gemma4", "nemotron_h", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid", "lfm2_moe")
SERVED = [case for case in CASES if not case.startswith(ON_CPUS)]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.kernel_change if case in DUE else pytest.mark.long) for case in SERVED],
)
def test_logits_equal_those_of_transformers(case: str, device: torch.device, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    requests = two_requests()
    with torch.no_grad():
        expected = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in requests]
    decoder = build_gpu_decoder(
        tmp_path,
        build_spec(load_config(tmp_path)),
        dtype=torch.float32,
        device=device,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
    )
    assert difference(gpu_logits(decoder, requests), expected) <= 1e-4
