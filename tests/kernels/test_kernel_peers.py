"""Peers compute what the kernels compute, from the same memory."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.kernels.attention import _FLEX_SHAPES, attention_cases, attention_peers, contiguous_inputs, flex, sdpa
from benchmarks.kernels.attention_case import AttentionCase, prepare
from kernels.attention import paged_attention_reference
from kernels.gpu.moe_config import Tile

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the bench itself runs them")

CPU = torch.device("cpu")
DECODE = AttentionCase("decode", "decode", (40, 40), (1, 1), 8, 4, 32, 32, 16)
PREFILL = AttentionCase("prefill", "prefill", (24, 24), (24, 24), 4, 2, 32, 32, 16)
CONTINUED = AttentionCase("continued prefill", "prefill", (40, 40), (24, 24), 4, 4, 32, 32, 16)
EXTEND = AttentionCase("extend", "extend", (40, 40), (5, 5), 4, 4, 32, 32, 16)
RAGGED = AttentionCase("ragged extend", "extend", (40, 22), (5, 3), 4, 2, 32, 32, 16)
FP8 = AttentionCase("fp8 decode", "decode", (40, 24), (1, 1), 8, 4, 32, 32, 16, torch.float8_e4m3fn)
TILE = Tile(32, 32, 1, 4, 2)


def prepared_case(case, monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.measure.COLD_BYTES", 2 * case.kv_bytes)
    return prepare(case, CPU, 8)


def relative(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("case", [DECODE, PREFILL, CONTINUED, EXTEND], ids=lambda case: case.name)
def test_torchs_attention_is_ours(case):
    """On torch's contiguous inputs, by the reference: each sequence is a block of its own."""
    q, keys, values = contiguous_inputs(case, CPU)
    causal = case.kind != "decode"
    found = flex(q, keys, values, causal)
    assert relative(found, sdpa(SDPBackend.MATH, q, keys, values, causal)) < 1e-2
    length, count = case.seq_lens[0], case.query_lens[0]
    rows = q.reshape(2, 1, -1, 32) if case.kind == "decode" else q.transpose(1, 2)
    expected = paged_attention_reference(
        rows.flatten(0, 1),
        keys.transpose(0, 1).flatten(1, 2),
        values.transpose(0, 1).flatten(1, 2),
        torch.arange(2 * length).view(2, length),
        torch.tensor(case.seq_lens),
        torch.tensor([0, count, 2 * count]),
        block_size=1,
        scale=32**-0.5,
    )
    assert (
        relative(found.transpose(1, 2).reshape(expected.shape) if causal else found.reshape(expected.shape), expected)
        < 1e-2
    )


@pytest.mark.parametrize(
    ("case", "peer", "reason"),
    [(RAGGED, "varlen_attn", "refuses"), (FP8, "torch", "dtype"), (DECODE, "flex_attention", "not compiled")],
    ids=lambda value: str(value)[:9],
)
def test_what_torch_cannot_compute_is_told_of(case, peer, reason, monkeypatch):
    assert reason in attention_peers(prepared_case(case, monkeypatch)).absent[peer]


def test_flex_attention_is_compiled_for_shapes_that_are_measured():
    shapes = {(len(case.seq_lens), case.seq_lens[0], case.query_lens[0]) for case in attention_cases()}
    assert shapes >= _FLEX_SHAPES


def test_heads_are_repeated_for_a_backend_that_knows_no_groups(monkeypatch):
    def refuse_groups(backend, q, keys, values, causal):
        if q.shape[1] != keys.shape[1]:
            raise RuntimeError("no available kernel")
        return sdpa(SDPBackend.MATH, q, keys, values, causal)

    monkeypatch.setattr("benchmarks.kernels.attention.sdpa", refuse_groups)
    calls = attention_peers(prepared_case(PREFILL, monkeypatch)).calls["SDPA cuDNN"]
    assert len(calls) == 2
    assert calls[0]().shape == (2, 4, 24, 32)


def test_a_peer_that_refuses_is_named(monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.attention._FLEX_SHAPES", {(2, 40, 1)})
    peers = attention_peers(prepared_case(DECODE, monkeypatch))
    # cuDNN computes on no CPU.
    assert peers.absent["SDPA cuDNN"].startswith("refuses")
    assert len(peers.calls["flex_attention"]) == 2
