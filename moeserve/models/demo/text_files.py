"""The checkpoint's JSON files: tokenizer, chat template, model and generation config."""

from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moeserve.models.demo.gguf_source import DenseShape, Vocabulary

# What SmolLM2's model card recommends. At temperature 1 so small a model soon loses the thread.
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE that splits digits one by one first, as the model was trained."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in vocabulary.control_ids]
    )
    return tokenizer


def write_text_files(out_dir: Path, shape: DenseShape, vocabulary: Vocabulary, config: dict[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and config.json into `out_dir`."""
    build_tokenizer(vocabulary).save(str(out_dir / "tokenizer.json"))
    write_json(out_dir / "tokenizer_config.json", _tokenizer_config(shape, vocabulary))
    ends = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "pad_token_id": vocabulary.pad_id}
    write_json(out_dir / "generation_config.json", ends | _SAMPLING)
    write_json(out_dir / "config.json", config | ends)


def llama_config(shape: DenseShape) -> dict[str, Any]:
    """config.json of the dense model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": shape.intermediate_size,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        **_common_config(shape),
    }


def mixtral_config(shape: DenseShape, *, experts: int, top_k: int) -> dict[str, Any]:
    """config.json of the mixture with tied partitions."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": shape.intermediate_size // top_k,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        **_common_config(shape),
    }


def split_config(shape: DenseShape, *, experts: int, top_k: int, shared: int) -> dict[str, Any]:
    """config.json of the mixture with split neurons, `shared` of which always run."""
    return {
        "architectures": ["MoeserveDemoForCausalLM"],
        "model_type": "moeserve_demo",
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": (shape.intermediate_size - shared) // experts,
        "shared_expert_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        **_common_config(shape),
    }


def write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _common_config(shape: DenseShape) -> dict[str, Any]:
    return {
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _tokenizer_config(shape: DenseShape, vocabulary: Vocabulary) -> dict[str, Any]:
    special = [vocabulary.tokens[i] for i in vocabulary.control_ids]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "additional_special_tokens": special,
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": vocabulary.chat_template,
    }
