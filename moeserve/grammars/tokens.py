"""A model's tokens as grammars see them.

llguidance encodes the text that a grammar forces with the model's tokenizer. Forced text is text: a constant that holds
`<|im_end|>` has to be written with ordinary tokens, byte for byte. So llguidance gets a `tokenizer.json` that finds no
special tokens in a text and changes no character of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer

from moeserve.grammars.compiler import GrammarError

_SPACE = {"String": " "}


def load_tokens(tokenizer_json: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokens of a `tokenizer.json`. Takes up to seconds for large vocabularies.

    Raise GrammarError if the file is missing or unreadable, or if it has none of the EOS tokens: a grammar needs one
    to end.
    """
    try:
        text = _verbatim(tokenizer_json.read_bytes())
        try:
            return LLTokenizer(text, eos_token=list(eos_token_ids))
        except ValueError:
            # Some checkpoints name tokens that the tokenizer lacks.
            size: int = LLTokenizer(text, slices=[]).vocab_size
            known = [token for token in eos_token_ids if token < size]
            if not known:
                raise GrammarError("the model names no token that ends its output") from None
            return LLTokenizer(text, eos_token=known)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise GrammarError(f"the model's tokenizer.json cannot be used: {error}") from None


def _verbatim(tokenizer_json: bytes) -> str:
    """Return a `tokenizer.json` that encodes each text by itself, whole and unchanged, without special tokens.

    Special tokens keep their ids and get names that no client can know. As llguidance has it, every added token in
    angle brackets is special.
    """
    content = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
    names, secret = {}, secrets.token_hex(16)
    for number, token in enumerate(content.get("added_tokens") or ()):
        token["lstrip"] = token["rstrip"] = False
        text = token["content"]
        if token["special"] or (text.startswith("<") and text.endswith(">")):
            token["content"] = names[text] = f"<{secret}{number}>"
    content["model"] = _renamed(content["model"], names)
    content["normalizer"] = _spelling(content.get("normalizer"))
    for part in _parts(content.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    content["truncation"] = content["padding"] = None
    return msgspec.json.encode(content).decode()


def _renamed(model: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a model with other names of tokens. Merges that make such a token, or begin with one, are left out."""
    vocab, merges = model["vocab"], model.get("merges")
    if isinstance(vocab, list):  # of pairs of a piece and its score
        return model | {"vocab": [[names.get(piece, piece), score] for piece, score in vocab]}
    changed: dict[str, Any] = {"vocab": {names.get(text, text): token for text, token in vocab.items()}}
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    if merges and not names.keys().isdisjoint(vocab):
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
        changed["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    return model | changed


def _parts(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer, or those of a sequence. inner: the key of its parts."""
    if part is None:
        return []
    return [one for each in part[inner] for one in _parts(each, inner)] if part["type"] == "Sequence" else [part]


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a normalizer that spells bytes and spaces as the vocabulary does. Others change characters."""
    kept = [
        part
        for part in _parts(normalizer, "normalizers")
        if part["type"] in ("ByteLevel", "Prepend") or (part["type"] == "Replace" and part["pattern"] == _SPACE)
    ]
    return {"type": "Sequence", "normalizers": kept} if kept else None
