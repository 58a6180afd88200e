"""The shapes by which attention is compared: their bounds, and that what they run is right."""

import pytest
import torch

from benchmarks.kernels.attention import MAX_KV_BYTES, attention_cases, ragged_lengths
from benchmarks.kernels.attention_case import AttentionCase, prepare
from kernels.gpu.attention_config import ExtendConfig, PrefillConfig, SplitConfig

pytestmark = pytest.mark.kernel_change

SPLIT = SplitConfig(16, 16, 4, 2, min_chunk=16, programs_per_sm=1)
CONFIGS = {"decode": SPLIT, "extend": ExtendConfig(SPLIT, 16), "prefill": PrefillConfig(16, 16, 4, 2)}
FP8, CPU = torch.float8_e4m3fn, torch.device("cpu")


def test_bytes_and_operations_of_known_shapes():
    cases = {case.name: case for case in attention_cases()}
    assert len(cases) == len(attention_cases())
    decode = cases["decode 64 x 4096, 32/4 heads"]
    assert decode.kv_bytes == 64 * 4096 * 2048
    assert decode.num_bytes == decode.kv_bytes + 64 * 32 * 256 * 2
    assert decode.num_flops == 64 * 4096 * 32 * 4 * 128
    assert cases["decode 64 x 4096 fp8, 32/4 heads"].kv_bytes == decode.kv_bytes // 2
    prefill = cases["prefill 1 x 16384, 32/4 heads"]
    assert prefill.num_flops == 4 * 32 * 128 * (16384 * 16385 // 2)
    assert cases["prefill 512 over 8192, 32/8 heads"].num_flops == 4 * 32 * 128 * sum(range(8193, 8705))
    extend = cases["extend 64 x 16 over 4096, 32/4 heads"]
    assert extend.num_bytes == 64 * 4112 * 2048 + 64 * 16 * 32 * 256 * 2
    assert extend.num_flops == 64 * 4 * 32 * 128 * sum(range(4097, 4113))
    assert cases["extend 64 x 8 over 4096 fp8, 32/4 heads"].kv_bytes == 64 * 4104 * 1024
    assert max(case.kv_bytes for case in cases.values()) <= MAX_KV_BYTES


def test_serving_computes_the_extends_as_extends():
    for case in attention_cases():
        if case.kind == "extend":
            assert 1 < max(case.query_lens) <= case.shape_on(CPU).extend().max_query_len
        elif case.kind == "prefill":
            assert min(case.query_lens) > case.shape_on(CPU).extend().max_query_len


def test_ragged_lengths_are_spread_and_repeat():
    lengths = ragged_lengths(64)
    assert lengths == ragged_lengths(64)
    assert min(lengths) >= 128
    assert max(lengths) <= 32768
    assert max(lengths) > 10 * min(lengths)


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("decode", "decode", (40, 7, 64), (1, 1, 1), 4, 2, 32, 32, 16),
        AttentionCase("latent", "decode", (40, 7), (1, 1), 20, 1, 80, 64, 16, latent=True),
        AttentionCase("decode fp8", "decode", (40, 7), (1, 1), 4, 2, 32, 32, 16, FP8),
        AttentionCase("extend", "extend", (40, 7, 70), (5, 7, 9), 4, 2, 32, 32, 16),
        AttentionCase("prefill", "prefill", (20, 33), (20, 5), 4, 2, 32, 32, 16),
    ],
    ids=lambda case: case.name,
)
def test_a_prepared_case_computes_what_the_reference_does(case, device, monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.measure.COLD_BYTES", 2 * case.kv_bytes)
    prepared = prepare(case, device, 8, config=CONFIGS[case.kind])
    assert prepared.num_sets == 2
    assert prepared.tensors.keys[:, :16].isnan().all()
    for index in range(2):
        assert prepared.relative_error(index) < 8e-3
        # Every token is written, not only compared ones.
        prepared.tensors.out.fill_(torch.nan)
        assert prepared.run(index).isfinite().all()
    # The other set has other numbers.
    assert not torch.equal(prepared.run(0).clone(), prepared.run(1))
