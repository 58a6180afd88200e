"""Every model type gives transformers' logits through the paged path, from a saved checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeserve.model.families import OWN_MODEL_TYPES, build_spec, load_config, supported_model_types
from moeserve.model.weights import load_decoder
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import CASES, save

_TOLERANCE = 1e-4
_LENGTHS = (21, 9)


@pytest.mark.parametrize("case", CASES)
def test_logits_on_a_cpu_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    generator = torch.Generator().manual_seed(2)
    requests = [torch.randint(1, 128, (length,), generator=generator).tolist() for length in _LENGTHS]
    with torch.no_grad():
        expected = [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in requests]

    spec = build_spec(load_config(tmp_path))
    decoder = load_decoder(tmp_path, spec, max_model_len=64)
    runner = PagedRunner(decoder, requests)
    found = [torch.empty_like(logits) for logits in expected]
    # Chunks of both, the first request's prompt longer; then both decode; the shorter finishes first.
    steps = [
        [(0, 0, 7)],
        [(0, 7, 13), (1, 0, 3)],
        [(1, 3, 6), (0, 13, 18)],
        [(0, 18, 19), (1, 6, 7)],
        [(0, 19, 20), (1, 7, 8)],
        [(1, 8, 9), (0, 20, 21)],
    ]
    for chunks in steps:
        logits = runner.step(chunks)
        row = 0
        for request, start, end in chunks:
            found[request][start:end] = logits[row : row + end - start]
            row += end - start
    difference = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    scale = max(logits.abs().max().item() for logits in expected)
    assert 0.5 < scale < 50
    assert difference <= _TOLERANCE, f"{difference:.1e} of {scale:.1f}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["olmoe-mha", "mixtral-mha-odd", "mixtral"])
def test_in_16_bits_logits_are_close(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec = build_spec(load_config(tmp_path))
    tokens = torch.randint(1, 128, (21,), generator=torch.Generator().manual_seed(2)).tolist()
    found = [
        PagedRunner(load_decoder(tmp_path, spec, dtype=dtype, max_model_len=64), [tokens]).step([(0, 0, 21)]).float()
        for dtype in (dtype, torch.float32)
    ]
    assert (found[0] - found[1]).std() < 0.2 * found[1].std()


def test_every_supported_type_has_a_parity_case() -> None:
    assert {case.split("-")[0] for case in CASES} == set(supported_model_types()) - OWN_MODEL_TYPES
