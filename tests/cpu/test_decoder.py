"""What the decoder promises beyond parity: the same bits in any batch, only the wanted rows, every field in effect."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from experts.observer import AnyObserver
from kernels.cpu.library import native_kernels
from kernels.packed_experts import SplitExperts
from kernels.specs import Activation, GateSpec
from moeserve.model.decoder import Decoder
from moeserve.model.families import build_spec, load_config
from moeserve.model.rounding import INT8, NO_ROUNDING, Rounding
from moeserve.model.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec
from moeserve.model.weights import load_decoder
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import CASES, build, save

_GELU = Activation("gelu")
_REQUESTS = [torch.randint(1, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (21, 9, 70)]


@cache
def _decoder(case: str, change: str = "none") -> Decoder:
    with TemporaryDirectory() as folder:
        save(case, Path(folder))
        spec = _CHANGES[change](build_spec(load_config(Path(folder))))
        return load_decoder(Path(folder), spec, max_model_len=80)


def _whole(decoder: Decoder) -> list[Tensor]:
    return [PagedRunner(decoder, [tokens]).step([(0, 0, len(tokens))]) for tokens in _REQUESTS]


@pytest.mark.parametrize("case", CASES)
def test_logits_have_the_same_bits_in_any_batch_and_chunking(case: str) -> None:
    decoder = _decoder(case)
    expected = _whole(decoder)
    runner = PagedRunner(decoder, _REQUESTS, seed=5)
    steps = [
        [(0, 0, 7), (2, 0, 9)],
        [(1, 0, 8), (2, 9, 60), (0, 7, 13)],
        [(0, 13, 20), (2, 60, 69)],
        [(2, 69, 70), (0, 20, 21), (1, 8, 9)],
    ]
    for chunks in steps:
        logits = runner.step(chunks)
        row = 0
        for request, start, end in chunks:
            assert torch.equal(logits[row : row + end - start], expected[request][start:end])
            row += end - start


def test_only_wanted_rows_have_logits() -> None:
    decoder = _decoder("mixtral")
    expected = _whole(decoder)
    logits = PagedRunner(decoder, _REQUESTS).step([(0, 0, 21), (1, 0, 9)], logit_rows=[20, 29, 3])
    assert torch.equal(logits, torch.stack([expected[0][20], expected[1][8], expected[0][3]]))


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3-yarn"])
def test_a_step_without_wanted_rows_still_stores_keys_and_values(case: str) -> None:
    decoder = _decoder(case)
    runner = PagedRunner(decoder, _REQUESTS)
    assert runner.step([(0, 0, 15)], logit_rows=[]).shape == (0, 128)
    assert torch.equal(runner.step([(0, 15, 21)]), _whole(decoder)[0][15:])


class _Log(AnyObserver):
    def __init__(self) -> None:
        self.heard: list[tuple[str, int, tuple[int, ...]]] = []
        self.num_passed = 0

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        assert len(x) == len(expert_ids)

    def chose(self, layer: int, expert_ids: Tensor) -> None:
        self.heard.append(("chose", layer, tuple(expert_ids.shape)))

    def attended(self, layer: int, residual: Tensor, shared: Tensor | None) -> None:
        assert shared is not None
        assert shared.shape == residual.shape
        self.heard.append(("attended", layer, tuple(residual.shape)))

    def passed(self) -> None:
        self.num_passed += 1


def test_observers_hear_of_every_layer_with_experts_and_of_the_stream_before_them(tmp_path: Path) -> None:
    save("deepseek_v3-yarn", tmp_path)
    spec, log = build_spec(load_config(tmp_path)), _Log()
    assert spec.moe is not None
    assert len(spec.moe_layers) == 2 < spec.num_layers
    decoder = load_decoder(tmp_path, spec, max_model_len=80, observers=[log])
    PagedRunner(decoder, _REQUESTS).step([(0, 0, 7)], logit_rows=[6])
    top_k = spec.moe.gate.top_k
    assert log.heard == [
        event
        for layer, count in enumerate((7, 1))
        for event in (("chose", layer, (count, top_k)), ("attended", layer, (count, spec.hidden_size)))
    ]
    assert log.num_passed == spec.num_layers


class _Choices(AnyObserver):
    """The chosen experts of the last step, layer by layer."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.num_whole = 0

    def chose(self, layer: int, expert_ids: Tensor) -> None:
        self.parts.append(expert_ids)

    def chose_all(self, expert_ids: Tensor) -> None:
        self.parts.append(expert_ids)
        self.num_whole += 1

    def take(self) -> Tensor:
        parts, self.parts = self.parts, []
        return torch.cat(parts)


class _StateChoices(_Choices):
    """Observes inputs of gates, which a step that is one call does not show."""

    def gated(self, layer: int, x: Tensor, expert_ids: Tensor) -> None:
        assert len(x) == len(expert_ids)


@pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
@pytest.mark.parametrize(
    "rounding",
    [NO_ROUNDING, replace(NO_ROUNDING, narrow=True), Rounding(INT8, INT8)],
    ids=["float32", "bfloat16", "int8"],
)
@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("mixtral", {}),
        ("mixtral-window", {}),
        ("olmoe-mha", {}),
        ("granitemoe", {}),
        ("gpt_oss", {}),
        ("minimax_m2", {}),
        ("qwen3_moe", {"mlp_only_layers": []}),
    ],
)
def test_layers_in_one_call_have_the_bits_of_one_layer_after_another(
    case: str, fields: dict[str, Any], rounding: Rounding, tmp_path: Path
) -> None:
    build(case, **fields).save_pretrained(tmp_path)
    spec, at_once, by_layers = build_spec(load_config(tmp_path)), _Choices(), _StateChoices()
    runners = [
        PagedRunner(load_decoder(tmp_path, spec, max_model_len=80, observers=[heard], rounding=rounding), _REQUESTS)
        for heard in (at_once, by_layers)
    ]
    steps = [([(0, 0, 7), (2, 0, 61)], [3, 6, 67]), ([(2, 61, 62)], None), ([(1, 0, 8), (0, 7, 20)], [])]
    steps += [([(2, 62, 70), (0, 20, 21), (1, 8, 9)], [9, 7])]
    for chunks, logit_rows in steps:
        whole, parts = (runner.step(chunks, logit_rows) for runner in runners)
        assert torch.equal(whole, parts)
        assert torch.equal(at_once.take(), by_layers.take())
    assert (at_once.num_whole, by_layers.num_whole) == (len(steps), 0)


@pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
def test_a_long_step_is_computed_layer_by_layer(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    spec, heard = build_spec(load_config(tmp_path)), _Choices()
    tokens = [1 + place % 100 for place in range(200)]
    decoder = load_decoder(tmp_path, spec, max_model_len=200, observers=[heard])
    PagedRunner(decoder, [tokens]).step([(0, 0, 200)])
    assert not heard.num_whole
    assert len(heard.parts) == spec.num_layers


@pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
def test_experts_that_were_called_with_another_activation_compute_a_step_with_their_own(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    decoder = load_decoder(tmp_path, build_spec(load_config(tmp_path)), max_model_len=80)
    before = PagedRunner(decoder, _REQUESTS).step([(0, 0, 9)])
    for experts in decoder.experts:
        assert isinstance(experts, SplitExperts)
        with torch.inference_mode():
            experts(torch.randn(2, decoder.spec.hidden_size), torch.zeros(2, 1).long(), torch.ones(2, 1), _GELU)
    assert torch.equal(PagedRunner(decoder, _REQUESTS).step([(0, 0, 9)]), before)


@pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
def test_an_absent_expert_fails_a_step_in_one_call(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    decoder = load_decoder(tmp_path, build_spec(load_config(tmp_path)), max_model_len=80)
    experts = decoder.experts[1]
    assert isinstance(experts, SplitExperts)
    for expert in range(len(experts)):
        experts.drop(expert)
    with pytest.raises(ValueError, match="is not here"):
        PagedRunner(decoder, _REQUESTS).step([(0, 0, 4)])


def _gqa(**fields: object) -> object:
    def change(spec: DecoderSpec) -> DecoderSpec:
        assert isinstance(spec.attention, AttentionSpec)
        return replace(spec, attention=replace(spec.attention, **fields))

    return change


def _mla(**fields: object) -> object:
    def change(spec: DecoderSpec) -> DecoderSpec:
        assert isinstance(spec.attention, MlaSpec)
        return replace(spec, attention=replace(spec.attention, **fields))

    return change


def _indexer(**fields: object) -> object:
    def change(spec: DecoderSpec) -> DecoderSpec:
        assert isinstance(spec.attention, MlaSpec)
        assert spec.attention.indexer is not None
        return replace(spec, attention=replace(spec.attention, indexer=replace(spec.attention.indexer, **fields)))

    return change


def _moe(**fields: object) -> object:
    def change(spec: DecoderSpec) -> DecoderSpec:
        assert isinstance(spec.moe, MoeSpec)
        return replace(spec, moe=replace(spec.moe, **fields))

    return change


def _gate(**fields: object) -> object:
    def change(spec: DecoderSpec) -> DecoderSpec:
        assert isinstance(spec.moe, MoeSpec)
        gate: GateSpec = replace(spec.moe.gate, **fields)
        return replace(spec, moe=replace(spec.moe, gate=gate))

    return change


_CHANGES = {
    "none": lambda spec: spec,
    "window": lambda spec: replace(spec, windows=(None,) * 3),
    "clip": _gqa(clip_qkv=None),
    "scale": _gqa(scale=0.25),
    "mla scale": _mla(scale=24**-0.5),
    "fewer positions": _indexer(top_k=5),
    "halves of the indexer": _indexer(interleaved=False),
    "pairs of the indexer": _indexer(interleaved=True),
    "embedding": lambda spec: replace(spec, embedding_multiplier=1.0),
    "residual": lambda spec: replace(spec, residual_multiplier=1.0),
    "divisor": lambda spec: replace(spec, logit_divisor=1.0),
    "interleaved": lambda spec: replace(spec, rope=replace(spec.rope, interleaved=False)),
    "rotary": lambda spec: replace(spec, rope=replace(spec.rope, rotary_dim=4)),
    "rope": lambda spec: replace(spec, rope=replace(spec.rope, kind="default")),
    "activation": lambda spec: _moe(activation=replace(spec.moe.activation, limit=7.0))(spec),
    "renormalise": _gate(renormalise=False),
    "gate scale": _gate(scale=1.0),
    "groups": _gate(num_groups=1, top_groups=1),
    "group score": _gate(group_score="max"),
    "jitter": _gate(jitter=0.0),
    "after": _gate(softmax_after_top_k=False),
}


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("mistral-window", "window"),
        ("qwen2", "window"),
        ("mixtral-window", "window"),
        ("gpt_oss", "window"),
        ("dots1", "window"),
        ("olmoe", "clip"),
        ("granitemoe", "scale"),
        ("granitemoe", "embedding"),
        ("granitemoe", "residual"),
        ("granitemoe", "divisor"),
        ("granitemoe", "after"),
        ("ernie4_5_moe", "interleaved"),
        ("deepseek_v2", "interleaved"),
        ("minimax_m2", "rotary"),
        ("llama-biases-llama3", "rope"),
        ("gpt_oss", "rope"),
        ("gpt_oss", "activation"),
        ("phimoe-longrope", "rope"),
        ("deepseek_v3-yarn", "rope"),
        ("deepseek_v3-yarn", "mla scale"),
        ("mixtral", "renormalise"),
        ("qwen3_moe", "renormalise"),
        ("glm4_moe", "renormalise"),
        ("glm4_moe", "gate scale"),
        ("glm4_moe", "groups"),
        ("dots1", "group score"),
        ("deepseek_v3-yarn", "groups"),
        ("phimoe-longrope", "jitter"),
        ("deepseek_v32-yarn", "fewer positions"),
        ("deepseek_v32-yarn", "pairs of the indexer"),
        ("glm_moe_dsa", "halves of the indexer"),
    ],
)
def test_every_field_of_the_spec_changes_the_logits(case: str, change: str) -> None:
    """So that parity means something: a field that had no effect would be right by chance."""
    pairs = zip(_whole(_decoder(case, change)), _whole(_decoder(case)), strict=True)
    assert max((changed - logits).abs().max().item() for changed, logits in pairs) > 0.01
