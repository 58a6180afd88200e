"""The cache report of a prompt: where its match in the prompt cache ended, and why, in words and with the texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Scope

from moeserve.frontend.dialects.internal import by_tier
from moeserve.frontend.text import TextTokenizer
from radix_cache import Miss, MissReason

_HEADER = b"x-moeserve-cache-report"
_OFF = frozenset({b"", b"0", b"false"})
_SHOWN_TOKENS = 12

_EXPLANATIONS = {
    MissReason.BYPASSED: "The cache was not asked: log probabilities of the prompt are computed, or caching is off.",
    MissReason.LAST_TOKEN: "All is cached but the end: the last token, or the block that it ends, is always computed.",
    MissReason.BLOCK_BOUNDARY: "All whole blocks are cached; the rest is less than a block.",
    MissReason.NO_STATE: (
        "Keys and values are cached up to token {known}, but no snapshot of the model's recurrent state is kept there."
    ),
    MissReason.NO_WINDOW: (
        "The prefix was cached up to token {known}, but what layers with a sliding window would see of it there was "
        "evicted to make room for others."
    ),
    MissReason.EVICTED: "The prefix was cached up to token {known} and was evicted to make room for others.",
    MissReason.OTHER_SALT: "Another cache_salt of this key has the prefix cached, up to token {known}.",
    MissReason.VOLATILE_HEAD: (
        "The prompt differs at token {position}, in {volatile} tokens, and equals {witnesses} earlier prompts again "
        "behind them: something at its head, such as a nonce or a time, changes with every request. Move it to the end."
    ),
    MissReason.DIVERGED: "At token {position} the prompt differs from the nearest prefix that is cached.",
    MissReason.NEVER_SEEN: "No prompt that went on like this was cached before.",
    MissReason.NOT_KNOWN: (
        "No such prefix is cached; it was never seen, or evicted too long ago for the record, which begins with the "
        "first report that this key asks for."
    ),
}


def asks_for_report(scope: Scope) -> bool:
    """Return whether the header `x-moeserve-cache-report` asks for a report."""
    return any(name == _HEADER and value.strip().lower() not in _OFF for name, value in scope["headers"])


def describe_miss(
    miss: Miss, prompt: Sequence[int], num_cached: int, num_on_disk: int | None, tokenizer: TextTokenizer
) -> dict[str, Any]:
    """Return the report of a prompt: `num_cached` of its tokens were cached, `num_on_disk` of them on disk.

    num_on_disk: None where the cache is in memory alone; the report then names no tiers.

    `yours` is the prompt's text from `at_token` on, `nearest` that of the nearest prefix of one's own from there on,
    `before` what both have before.
    """

    def text(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    position = miss.position
    report: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "matched_tokens": num_cached,
        "reason": miss.reason.value,
        "at_token": position,
        "explanation": _EXPLANATIONS[miss.reason].format(
            known=miss.num_known_tokens,
            position=position,
            volatile=miss.num_volatile_tokens,
            witnesses=miss.num_witnesses,
        ),
    }
    if num_on_disk is not None:
        report["matched_tokens_details"] = by_tier(num_cached, num_on_disk)
    if position < len(prompt) and miss.reason is not MissReason.BYPASSED:
        report["before"] = text(prompt[max(0, position - _SHOWN_TOKENS) : position])
        report["yours"] = text(prompt[position : position + _SHOWN_TOKENS])
    if miss.nearest:
        report["nearest"] = text(miss.nearest[position - miss.nearest_start :])
    if miss.num_known_tokens:
        report["known_tokens"] = miss.num_known_tokens
    if miss.reason is MissReason.VOLATILE_HEAD:
        differing = prompt[position : position + miss.num_volatile_tokens]
        report["volatile_head"] = {
            "at_token": position,
            "tokens": miss.num_volatile_tokens,
            "text": text(differing),
            "prompts": miss.num_witnesses,
        }
    return report
