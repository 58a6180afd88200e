"""Inverse frequencies agree with transformers' for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.model.decoder import RopeTable
from moeserve.model.rope import parse_rope, rope_frequencies, yarn_softmax_multiplier
from moeserve.model.spec import ModelError

_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(16)],
    "long_factor": [1.5 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _reference(parameters: dict[str, Any], seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 5e4, **parameters},
    )
    inverse, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=seq_len)
    return inverse, scale


def _rope(parameters: dict[str, Any]) -> Any:
    partial = parameters.get("partial_rotary_factor", 1.0)
    return parse_rope({"rope_theta": 5e4, **parameters}, rotary_dim=int(32 * partial), max_position=2048)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "factor": 4.0},
        _LLAMA3,
        _YARN,
        {**_YARN, "truncate": False},
        {**_YARN, "beta_fast": 4, "beta_slow": 2},
        {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        {**_YARN, "attention_factor": 1.3},
        {**_YARN, "factor": None},
        {**_YARN, "partial_rotary_factor": 0.5},
        _LONG,
        {**_LONG, "factor": 3.0},
        {**_LONG, "attention_factor": 1.1},
    ],
    ids=lambda parameters: " ".join(f"{key}" for key in parameters if key != "rope_theta")[:60],
)
def test_frequencies_agree_with_transformers(parameters: dict[str, Any]) -> None:
    inverse, scale = _reference(parameters)
    found = rope_frequencies(_rope(parameters), 512)
    torch.testing.assert_close(torch.tensor(found.inverse), inverse, rtol=2e-6, atol=0)
    assert found.scale == pytest.approx(scale, rel=1e-9)


def test_longrope_uses_its_long_factors_in_a_service_with_contexts_beyond_the_original_one() -> None:
    inverse, scale = _reference(_LONG, seq_len=513)
    found = rope_frequencies(_rope(_LONG), 513)
    torch.testing.assert_close(torch.tensor(found.inverse), inverse, rtol=2e-6, atol=0)
    assert found.scale == pytest.approx(scale)


def test_explicit_magnitudes_of_longrope_win() -> None:
    rope = _rope({**_LONG, "short_mscale": 1.25, "long_mscale": 1.5})
    assert rope_frequencies(rope, 512).scale == 1.25
    assert rope_frequencies(rope, 513).scale == 1.5


def test_only_a_longrope_with_two_kinds_of_factors_has_a_short_context() -> None:
    assert _rope(_LONG).short_context == 512
    assert _rope(_YARN).short_context is None
    same = {**_LONG, "long_factor": _LONG["short_factor"]}
    assert _rope(same).short_context is None
    assert _rope({**same, "short_mscale": 1.25, "long_mscale": 1.5}).short_context == 512


def test_softmax_multiplier_follows_mscale_all_dim() -> None:
    assert yarn_softmax_multiplier(_rope(_YARN)) == 1.0
    assert yarn_softmax_multiplier(_rope({**_YARN, "mscale_all_dim": 1.0})) == pytest.approx(1.4590, abs=1e-3)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"rope_type": "linear"}, "lack factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "lack long_factor"),
        ({**_LONG, "long_factor": [1.0]}, "long_factor has 1 values, not 16"),
    ],
)
def test_incomplete_parameters_are_named(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        _rope(parameters)


def test_table_holds_the_angles_of_every_position() -> None:
    rope = _rope(_YARN)
    frequencies = rope_frequencies(rope, 64)
    cos, sin = RopeTable(rope, 64, torch.float32)(torch.tensor([63, 0, 5]))
    assert cos.shape == sin.shape == (3, 16)
    angles = torch.tensor([[63.0], [0.0], [5.0]]).double() * torch.tensor(frequencies.inverse).double()
    torch.testing.assert_close(cos.double(), angles.cos() * frequencies.scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin.double(), angles.sin() * frequencies.scale, rtol=0, atol=1e-5)
