"""A tokenizer whose tokens are bytes, and the files of a checkpoint around it. Token id of byte b is b."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from moeserve.frontend.text import byte_alphabet

BOS, USER, ASSISTANT, END = 256, 257, 258, 259
EOS = END
VOCAB_SIZE = 260
SPECIALS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(specials: Sequence[str] = SPECIALS) -> Tokenizer:
    """256 byte tokens and, behind them, the special ones."""
    vocab = dict(byte_alphabet())
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    return tokenizer


def write_model_dir(folder: Path, template: str | None = TEMPLATE, specials: Sequence[str] = SPECIALS) -> Path:
    """Writes what a frontend reads of a checkpoint. The first special token is BOS, the fourth EOS. template: of chats,
    None for a model without."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(specials).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": specials[0], "eos_token": {"content": specials[3]}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
