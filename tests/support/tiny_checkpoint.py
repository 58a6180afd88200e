"""A complete checkpoint of a tiny random Mixtral with the byte tokenizer: starts in seconds, answers noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_model import BOS, EOS, SPECIALS, TEMPLATE, write_model_dir

_HIDDEN, _FFN, _LAYERS, _HEADS, _KV_HEADS, _EXPERTS = 32, 48, 2, 4, 2, 4
MAX_POSITION = 65536


def write_tiny_checkpoint(
    folder: Path, template: str = TEMPLATE, specials: Sequence[str] = SPECIALS, seed: int = 0
) -> Path:
    """Writes config, weights (float32) and tokenizer into `folder` and returns it. seed: of the weights."""
    write_model_dir(folder, template, specials)
    vocab_size = 256 + len(specials)
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FFN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(vocab_size, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    head_dim = _HIDDEN // _HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    norm = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, _HIDDEN),
        "model.norm.weight": norm,
        "lm_head.weight": matrix(vocab_size, _HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm,
            f"{prefix}.post_attention_layernorm.weight": norm,
            f"{prefix}.self_attn.q_proj.weight": matrix(_HEADS * head_dim, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(_KV_HEADS * head_dim, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(_KV_HEADS * head_dim, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * head_dim),
            f"{prefix}.block_sparse_moe.gate.weight": matrix(_EXPERTS, _HIDDEN),
        }
        for expert in range(_EXPERTS):
            stem = f"{prefix}.block_sparse_moe.experts.{expert}"
            weights |= {
                f"{stem}.w1.weight": matrix(_FFN, _HIDDEN),
                f"{stem}.w2.weight": matrix(_HIDDEN, _FFN),
                f"{stem}.w3.weight": matrix(_FFN, _HIDDEN),
            }
    return weights
