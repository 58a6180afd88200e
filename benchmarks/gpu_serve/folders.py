"""Model folders without weights, whose tokenizers have a text for every token: a stream tells each of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from moeserve.frontend.text import byte_alphabet
from moeserve.model.sizes import write_dummy

# The sizes of Qwen3-30B-A3B.
LARGE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_SPECIALS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model whose weights are drawn. Its vocabulary has all bytes, the special tokens, and plain words."""
    folder.mkdir(parents=True, exist_ok=True)
    size = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": size - 1}))
    write_dummy(folder)
    _tokenizer(size).save(str(folder / "tokenizer.json"))
    texts = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[3], "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    return folder


def _tokenizer(size: int) -> Tokenizer:
    vocab = dict(byte_alphabet())
    vocab |= {f"w{number}": number for number in range(len(vocab), size - len(_SPECIALS))}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIALS])
    return tokenizer
