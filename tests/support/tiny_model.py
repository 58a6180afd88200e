"""A tokenizer whose tokens are bytes, and the files of a checkpoint around it. Token id of byte b is b."""

from __future__ import annotations

import json
from pathlib import Path

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


def byte_tokenizer() -> Tokenizer:
    """256 byte tokens and four special ones."""
    vocab = dict(byte_alphabet())
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def write_model_dir(folder: Path) -> Path:
    """Writes what a frontend reads of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
