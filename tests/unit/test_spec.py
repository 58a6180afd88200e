"""Configurations become specs, or a sentence that says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeserve.model.families import build_spec, check_model_type, is_native, supported_model_types
from moeserve.model.generation import load_generation_defaults
from moeserve.model.rope import rope_frequencies
from moeserve.model.shards import check_shards
from moeserve.model.spec import (
    AttentionSpec,
    KvLayerSpec,
    MlaSpec,
    ModelError,
    QuantizationSpec,
    StateShape,
    UnsupportedModel,
)
from moeserve.model.stages import Stage

_MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_DEEPSEEK: dict[str, Any] = {
    **_MIXTRAL,
    "model_type": "deepseek_v3",
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_local_experts": None,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}


def test_spec_of_a_grouped_query_model_gives_heads_caches_and_special_tokens() -> None:
    spec = build_spec(_MIXTRAL)
    assert isinstance(spec.attention, AttentionSpec)
    assert (spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim) == (4, 2, 16)
    assert spec.attention.scale == 0.25
    assert spec.kv_layers == (KvLayerSpec(2, 16, 16),) * 3
    assert (spec.num_layers, spec.vocab_size, spec.max_position) == (3, 100, 512)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((2,), 1)
    assert spec.windows == (None, None, None)
    assert spec.moe is not None
    assert spec.moe.gate.renormalise


def test_latent_attention_caches_one_head_whose_values_are_its_keys() -> None:
    spec = build_spec(_DEEPSEEK)
    assert isinstance(spec.attention, MlaSpec)
    assert spec.kv_layers == (KvLayerSpec(1, 40, 0),) * 3
    assert spec.sparse_layers == (False, True, True)
    assert spec.moe is not None
    assert spec.moe.shared is not None
    assert spec.moe.shared.intermediate_size == 48


_INDEXED: dict[str, Any] = {
    **_DEEPSEEK,
    "q_lora_rank": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["indexed_attention"] * 3,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 7,
}


def test_keys_of_an_indexer_lie_beside_the_latents() -> None:
    spec = build_spec({**_INDEXED, "model_type": "deepseek_v32"})
    assert spec.kv_layers == (KvLayerSpec(1, 40, 16),) * 3
    assert spec.gpu_obstacle == (
        "--device cuda: models of type 'deepseek_v32' are computed on a CPU only so far, as their attention is indexed."
    )
    types = {"indexer_types": ["full", "shared", "full"]}
    spec = build_spec({**_INDEXED, "model_type": "glm_moe_dsa", **types})
    assert spec.kv_layers == (KvLayerSpec(1, 40, 16), KvLayerSpec(1, 40, 0), KvLayerSpec(1, 40, 16))
    assert spec.of_layers(Stage(0, 2, 3)).kv_layers == spec.kv_layers[:2]
    with pytest.raises(UnsupportedModel, match="layer 1 attends to the positions that layer 0 does, so one rank has"):
        spec.of_layers(Stage(1, 3, 3))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "indexer_types do not say how each layer"),
        ({"indexer_types": ["full", "full"]}, "indexer_types do not say how each layer"),
        ({"indexer_types": ["full", "none", "full"]}, "indexer_types do not say how each layer"),
        ({"index_head_dim": 4}, "heads of 4 cannot rotate 8 channels"),
        ({"layer_types": ["full_attention"] * 3}, "with layers without an indexer are not supported"),
        ({"index_topk": 0}, "index_topk is 0"),
    ],
)
def test_an_indexer_that_cannot_choose_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_spec({**_INDEXED, "model_type": "glm_moe_dsa", "indexer_types": ["full"] * 3, **changes})


def test_several_end_tokens_are_kept() -> None:
    assert build_spec({**_MIXTRAL, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert build_spec({**_MIXTRAL, "eos_token_id": None}).eos_token_ids == ()


def test_a_window_counts_on_all_layers_without_layer_types() -> None:
    assert build_spec({**_MIXTRAL, "sliding_window": 16}).windows == (16, 16, 16)
    assert build_spec({**_MIXTRAL, "sliding_window": 0}).windows == (None, None, None)


def test_layer_types_choose_the_windowed_layers() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = build_spec({**_MIXTRAL, "sliding_window": 16, "layer_types": types})
    assert spec.windows == (16, None, 16)


def test_sparse_step_and_dense_layers_of_qwen_are_followed() -> None:
    qwen = {
        **_MIXTRAL,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "num_hidden_layers": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    assert build_spec(qwen).sparse_layers == (False, True, False, False, False, True)


def test_quantisation_is_recognised_or_refused_by_name() -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert build_spec({**_MIXTRAL, "quantization_config": fp8}).quantization == QuantizationSpec("fp8", (128, 128))
    mxfp4 = {"quant_method": "mxfp4"}
    assert build_spec({**_MIXTRAL, "quantization_config": mxfp4}).quantization == QuantizationSpec("mxfp4", (1, 32))
    gptq = build_spec({**_MIXTRAL, "quantization_config": {"quant_method": "gptq", "bits": 4}}).quantization
    assert gptq == QuantizationSpec("gptq", form="INT4_F16", zeros_less_one=True, widths=((4, 0),))
    with pytest.raises(UnsupportedModel, match="'quanto'"):
        build_spec({**_MIXTRAL, "quantization_config": {"quant_method": "quanto"}})


@pytest.mark.parametrize("model_type", ["jamba", "mamba2"])
def test_recurrent_types_are_refused_with_their_name_and_the_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{model_type}' are not supported: their kind of recurrent layers"):
        check_model_type(model_type)


@pytest.mark.parametrize("model_type", ["bert", "llama4", "mixtrall"])
def test_unknown_types_are_refused_with_the_list_of_known_ones(model_type: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{model_type}' are not supported; these are: .*mixtral"):
        check_model_type(model_type)


@pytest.mark.parametrize("model_type", [None, "", 7])
def test_a_configuration_without_a_type_is_refused(model_type: object) -> None:
    with pytest.raises(UnsupportedModel, match="no model_type"):
        check_model_type(model_type)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"num_experts_per_tok": 9}, "9 experts per token .* 8"),
        ({"layer_types": ["linear_attention"] * 3}, "'linear_attention' are not supported"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "type 'spiral' are not supported"),
        ({"hidden_size": "big"}, "hidden_size is 'big': it must be a whole number"),
    ],
)
def test_contradictions_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_spec({**_MIXTRAL, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"n_group": 3}, "3 equal groups"), ({"topk_group": 1, "num_experts_per_tok": 3}, "hold fewer than 3")],
)
def test_groups_that_cannot_give_enough_experts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_spec({**_DEEPSEEK, **changes})


def test_a_missing_value_is_named() -> None:
    config = {key: value for key, value in _MIXTRAL.items() if key != "num_local_experts"}
    with pytest.raises(ModelError, match="mixtral model lacks 'num_local_experts'"):
        build_spec(config)


def test_thirty_two_types_are_served() -> None:
    assert len(supported_model_types()) == 32


_HYBRID: dict[str, Any] = {
    **_MIXTRAL,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


def test_recurrent_layers_keep_states_in_place_of_keys_and_values() -> None:
    spec = build_spec(_HYBRID)
    assert spec.recurrent_layers == (True, False, True)
    assert spec.kv_layers == (KvLayerSpec(2, 16, 16),)
    states = (StateShape((3, 2 * 2 * 8 + 4 * 16), keep_fp32=False), StateShape((4, 8, 16), keep_fp32=True))
    assert spec.state_layers == (states, states)
    assert build_spec({**_HYBRID, "layer_types": ["full_attention"] * 3}).state_layers == ()


_GEMMA: dict[str, Any] = {
    **{key: value for key, value in _MIXTRAL.items() if key != "hidden_act"},
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    "hidden_size_per_layer_input": 0,
}


def test_layers_with_a_window_may_have_heads_and_angles_of_their_own() -> None:
    spec = build_spec(_GEMMA)
    narrow = KvLayerSpec(2, 16, 16, 8)
    assert spec.kv_layers == (narrow, KvLayerSpec(1, 32, 32), narrow)
    assert spec.window_rope is not None
    assert (spec.window_rope.rotary_dim, spec.rope.rotary_dim) == (16, 32)
    frequencies = rope_frequencies(spec.rope, 512).inverse
    assert frequencies[4:] == (0.0,) * 12
    assert frequencies[:4] == pytest.approx([1e6 ** (-channel / 32) for channel in (0, 2, 4, 6)])
    assert spec.gpu_obstacle == (
        "--device cuda: our own code computes models of type 'gemma4_text' on a CPU only so far; --model-impl "
        "transformers takes a GPU."
    )


def test_layers_that_share_keys_and_values_keep_none_of_their_own() -> None:
    spec = build_spec({**_GEMMA, "num_kv_shared_layers": 1})
    assert spec.kv_layers == (KvLayerSpec(2, 16, 16, 8), KvLayerSpec(1, 32, 32))
    assert [spec.kv_source(layer) for layer in range(3)] == [0, 1, 0]
    with pytest.raises(UnsupportedModel, match="--pipeline-parallel-size: layers of this gemma4_text model"):
        spec.of_layers(Stage(0, 2, 3))
    with pytest.raises(ModelError, match="No earlier layer of this gemma4 model has the keys"):
        build_spec({**_GEMMA, "num_kv_shared_layers": 2})


def test_layers_whose_parts_have_norms_behind_them_are_not_shared_among_ranks() -> None:
    with pytest.raises(UnsupportedModel, match=r"--tensor-parallel-size 2: .*gemma4_text"):
        check_shards(build_spec(_GEMMA), 2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "enable_moe_block": True},
            "experts beside dense blocks of two widths",
        ),
        ({"use_bidirectional_attention": "all"}, "attention in both directions"),
    ],
)
def test_models_of_a_type_that_our_own_code_computes_in_part_are_left_to_transformers_code(
    changes: dict[str, Any], part: str
) -> None:
    config = {**_GEMMA, **changes}
    assert is_native(_GEMMA, "auto")
    assert is_native({"model_type": "gemma4", "text_config": _GEMMA}, "auto")
    assert not is_native(config, "auto")
    assert not is_native({"model_type": "gemma4", "text_config": config}, "auto")
    with pytest.raises(UnsupportedModel, match=part):
        build_spec(config)


def test_a_vision_language_model_is_the_text_model_inside_it() -> None:
    text = {**_HYBRID, "model_type": "qwen3_5_moe_text"}
    whole = build_spec({"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True})
    assert whole == replace(build_spec(text), model_type="qwen3_5_moe", tie_embeddings=True)
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000"):
        build_spec({"model_type": "qwen3_5_moe", "text_config": {**text, "num_hidden_layers": 10**9}})
    with pytest.raises(ModelError, match="text_config is a list: it must be an object"):
        build_spec({"model_type": "qwen3_5_moe", "text_config": [text]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"layer_types": ["linear_attention"] * 3}, "without a layer of attention"),
        ({"layer_types": ["linear_attention", "sparse", "full_attention"]}, "Layers of type 'sparse'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1: it must be from 2 to 64"),
    ],
)
def test_recurrent_layers_that_are_not_computed_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_spec({**_HYBRID, **changes})


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"inner": value}
    return value


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers is 1000000000: it must be from 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"head_dim": 10**9}, "head_dim is 1000000000"),
        ({"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        ({"num_local_experts": 0}, "2 experts per token .* 0"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1: it must be above 1"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is not a finite number"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0: it must be above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is a list: it must be an object"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is not a finite number"),
        ({"surprise": _nested(20)}, "nested more than 16 deep"),
        ({"surprise": 10**30}, "surprise is 10"),
        ({"layer_types": ["full_attention"] * 200_000}, "layer_types has 200000 entries"),
    ],
)
def test_numbers_that_no_model_has_are_refused_before_anything_is_sized_by_them(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_spec({**_MIXTRAL, **changes})


def test_longer_contexts_of_a_longrope_are_for_services_that_ask_for_them() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
    longrope = {**factors, "original_max_position_embeddings": 64}
    spec = build_spec({**_MIXTRAL, "rope_parameters": longrope})
    assert (spec.longest_context(None), spec.longest_context(65)) == (64, spec.max_position)
    same = build_spec({**_MIXTRAL, "rope_parameters": {**longrope, "long_factor": [1.0] * 8}})
    assert same.longest_context(None) == same.max_position > 64


def test_rotations_that_are_not_finite_are_refused() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8, "factor": 2.0}
    with pytest.raises(ModelError, match="is not valid"):
        build_spec({**_MIXTRAL, "rope_parameters": {**factors, "original_max_position_embeddings": 64}})


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_that_do_not_share_the_experts_are_refused(groups: int) -> None:
    changes = {"topk_method": "group_limited_greedy", "n_group": groups, "model_type": "deepseek_v2"}
    with pytest.raises(ModelError, match=f"8 experts .* {groups} equal groups"):
        build_spec({**_DEEPSEEK, **changes})


def test_sampling_defaults_that_no_request_could_ask_for_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": NaN, "top_p": 0.9, "top_k": 1e300, "min_p": -1, "repetition_penalty": 1e308,'
        ' "eos_token_id": 7}'
    )
    defaults = load_generation_defaults(tmp_path)
    assert defaults.sampling == {"top_p": 0.9}
    assert defaults.left_out == ("temperature=nan", "top_k=1e+300", "min_p=-1", "repetition_penalty=1e+308")
    assert defaults.eos_token_ids == (7,)


def test_the_longest_answer_is_read_and_settings_go_before_the_file(tmp_path: Path) -> None:
    assert load_generation_defaults(tmp_path).max_new_tokens is None
    assert load_generation_defaults(tmp_path, {"max_new_tokens": 5}).max_new_tokens == 5
    file = tmp_path / "generation_config.json"
    file.write_text('{"max_new_tokens": 2048, "top_p": 0.9, "top_k": 7, "eos_token_id": 7}')
    found = load_generation_defaults(tmp_path, {"top_p": 0.5})
    assert (found.max_new_tokens, found.sampling, found.eos_token_ids) == (2048, {"top_p": 0.5, "top_k": 7.0}, (7,))
    file.write_text('{"max_new_tokens": -1}')
    assert load_generation_defaults(tmp_path).left_out == ("max_new_tokens=-1",)


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}', "[" * 100_000])
def test_generation_defaults_that_cannot_be_read_are_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config.json"):
        load_generation_defaults(tmp_path)
