"""The tokenizer of a GGUF model as `tokenizer.json`: byte-level BPE, and BPE by scores as SentencePiece has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moeserve.model.gguf.fields import VOCABULARY, TypedFields, plain
from moeserve.model.spec import CheckpointError, UnsupportedModel

# Kinds of tokens in `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ADVICE = "put the model's tokenizer.json beside the file"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As o200k, but without contractions, and digits are words of their own.
_TEKKEN = _O200K.replace(f"{_CONTRACTIONS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
# As o200k, but Chinese characters are words of their own.
_KIMI_K2 = r"\p{Han}+|" + _O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
# DeepSeek's expressions cut one after the other, so that letters of ASCII, which count as punctuation, are cut out of
# words with other ones.
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Digits in threes from the right, the scripts without spaces between words, and DeepSeek's last expression.
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e00-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK_V3[2],
)
# As files are cut that do not tell how, or tell that nobody knew.
_DEFAULT = (
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9]{3}",
)
# By `tokenizer.ggml.pre`: the expressions that cut a text before bytes are merged. None: GPT-2's expression; before it
# single digits are cut apart where the name is in _SINGLE_DIGITS.
_EXPRESSIONS: Mapping[str, tuple[str, ...] | None] = {
    "default": _DEFAULT,
    "gpt-2": None,
    "olmo": None,
    "smollm": None,
    "refact": None,
    "llama3": (_LLAMA3,),
    "llama-bpe": (_LLAMA3,),
    "glm4": (_LLAMA3,),
    "chatglm-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "deepseek-r1-qwen": (_QWEN2,),
    "gpt-4o": (_O200K,),
    "minimax-m2": (_O200K,),
    "kimi-k2": (_KIMI_K2,),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "lfm2": (_LLAMA3,),
    "pixtral": (_LLAMA3,),
    "tekken": (_TEKKEN,),
    "hunyuan": (_QWEN2,),
    "granite-docling": None,
    "afmoe": _AFMOE,
}
_SINGLE_DIGITS = frozenset(("smollm", "refact"))
# Words that are a token are not merged, and texts begin with a BOS token unless the file says otherwise.
_WHOLE_WORDS = frozenset(("llama3", "llama-bpe", "lfm2", "pixtral", "tekken"))
# Texts are put into composed form (NFC) first, as by the tokenizers that the files were made from.
_COMPOSED = frozenset(("qwen2", "qwen35", "olmo"))
# Of architectures whose first files do not name it.
_UNNAMED = {"qwen2": "qwen2", "qwen2moe": "qwen2"}
# Ids of tokens in files of SentencePiece's BPE that do not name them.
_USUAL_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# Fields that change how texts are cut, or which tokens are drawn, and their values that change nothing.
_NEUTRAL = {
    "escape_whitespaces": True,
    "precompiled_charsmap": [],
    "normalizer.lowercase": False,
    "remove_extra_whitespaces": False,
    "suppress_tokens": [],
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer. Raise CheckpointError if its fields do not fit, UnsupportedModel for another kind."""
    fields = TypedFields(metadata, VOCABULARY)
    kind, tokens, types = fields.text("model"), fields.texts("tokens"), fields.numbers("token_type")
    if tokens is None:
        raise CheckpointError(f"The GGUF file holds no vocabulary: {_ADVICE}.")
    if types is None:
        types = [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError("The GGUF file's kinds of tokens do not fit its vocabulary.")
    for name, neutral in _NEUTRAL.items():
        if plain(fields.get(name, neutral)) != neutral:
            raise UnsupportedModel(f"The GGUF file's tokenizer sets {name}, which is not supported here: {_ADVICE}.")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens, str(metadata.get("general.architecture")))
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens, types)
    elif kind == "gemma4":
        tokenizer = _gemma(fields, tokens, types)
    else:
        raise UnsupportedModel(f"GGUF tokenizers of kind {str(kind)[:40]!r} are not supported: {_ADVICE}.")
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL) + _added(tokens, types, _UNKNOWN))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    processor = _processor(fields, tokens)
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def _processor(fields: TypedFields, tokens: list[str]) -> processors.TemplateProcessing | None:
    """Return what puts a token before and after texts, None where the file wants neither."""
    ids, before, after = _token_ids(fields, tokens), ["bos"], ["eos"]
    if "bos" not in ids or not _begins_with_bos(fields):
        before = []
    if "eos" not in ids or not fields.flag("add_eos_token", False):
        after = []
    if not before and not after:
        return None
    named = [{"id": name, "ids": [ids[name]], "tokens": [tokens[ids[name]]]} for name in before + after]
    return processors.TemplateProcessing([*before, "$A", *after], [*before, "$A", "$B", *after], named)


def tokenizer_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json`: the chat template and the tokens that it may name."""
    fields = TypedFields(metadata, VOCABULARY)
    tokens = fields.texts("tokens") or []
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    ids = _token_ids(fields, tokens)
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if key in ids:
            config[name] = tokens[ids[key]]
    config["add_bos_token"] = _begins_with_bos(fields)
    if (template := TypedFields(metadata, "tokenizer.").text("chat_template")) is not None:
        config["chat_template"] = template
    return config


def _token_ids(fields: TypedFields, tokens: list[str]) -> dict[str, int]:
    """Return the ids of the tokens that the file names and has, or that are usual where it does not name them."""
    usual = _USUAL_IDS if fields.text("model") == "llama" else {}
    names = ("bos", "eos", "unknown", "padding")
    ids = {key: fields.whole(f"{key}_token_id", usual.get(key)) for key in names}
    return {key: token for key, token in ids.items() if token is not None and 0 <= token < len(tokens)}


def _begins_with_bos(fields: TypedFields) -> bool:
    """Return whether texts begin with the BOS token: where the file does not tell, as llama.cpp has it."""
    usual = fields.text("model") in ("llama", "gemma4") or fields.text("pre") in _WHOLE_WORDS
    return fields.flag("add_bos_token", usual)


def _added(tokens: list[str], types: Sequence[float], kind: int) -> list[AddedToken]:
    special = kind in (_CONTROL, _UNKNOWN)
    chosen = (token for token, own in zip(tokens, types, strict=True) if own == kind and token)
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _byte_level(fields: TypedFields, tokens: list[str], architecture: str) -> Tokenizer:
    pre = fields.text("pre") or _UNNAMED.get(architecture, "default")
    if pre not in _EXPRESSIONS:
        raise UnsupportedModel(f"How {pre[:40]!r} cuts texts into words is not known here: {_ADVICE}.")
    merges = fields.texts("merges")
    if merges is None:
        raise CheckpointError("The GGUF file's tokenizer has no merges.")
    pairs = [_pair(merge) for merge in merges]
    try:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in _WHOLE_WORDS))
    except Exception as error:  # The library raises its own exceptions for merges that do not fit.
        raise CheckpointError(f"The GGUF file's tokenizer does not fit together: {str(error)[:200]}.") from None
    expressions = _EXPRESSIONS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
    if expressions is not None:
        steps += [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expressions is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"The GGUF file's tokenizer has the merge {merge[:80]!r}, which is no pair.")
    return left, right


def _sentencepiece(fields: TypedFields, tokens: list[str], types: Sequence[float]) -> Tokenizer:
    """Return BPE that merges the pair whose token has the best score, with bytes for characters without a token."""
    scores = fields.numbers("scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError("The GGUF file's scores of tokens do not fit its vocabulary.")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = fields.flag("add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _gemma(fields: TypedFields, tokens: list[str], types: Sequence[float]) -> Tokenizer:
    """Return BPE by merges over whole texts, with bytes for characters without a token."""
    merges = fields.texts("merges")
    if merges is None:
        raise CheckpointError("The GGUF file's tokenizer has no merges.")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    vocabulary, pairs = {token: i for i, token in enumerate(tokens)}, [_pair(merge) for merge in merges]
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # The library raises its own exceptions for merges that do not fit.
        raise CheckpointError(f"The GGUF file's tokenizer does not fit together: {str(error)[:200]}.") from None
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(tokens: list[str], types: Sequence[float], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, the best score of their token first.

    SentencePiece merges the neighbours whose token has the best score, which is what ranks do in that order.
    """
    merged = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL and len(token) > 1}
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    pairs = []
    for token, i in merged.items():
        found = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs += [(-scores[i], i, left, right) for left, right in found if left in known and right in known]
    return [(left, right) for _, _, left, right in sorted(pairs)]
