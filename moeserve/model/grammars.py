"""The grammars of a rank's requests: one matcher per request, and the masks of a step, made while it is computed.

A mask is a function of the grammar and the output so far, which are both in the plan. Matchers are kept here only to
save time: a matcher that does not fit (after a preemption, or lost) is made again from the plan.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from moeserve.grammar import GrammarError, compile_grammar, error_of, load_tokens
from moeserve.model.token_masks import TokenMasks
from moeserve.plan import GRAMMAR_FAILED, Chunk

log = structlog.get_logger(__name__)

_KEPT_COMPILED = 32
_KEPT_MATCHERS = 64


@dataclass(slots=True)
class _Held:
    """A request's matcher and the tokens that it has consumed. shared: True if other requests use the same lexer."""

    matcher: LLMatcher
    grammar: str
    consumed: array[int]
    shared: bool


class Grammars:
    """Makes the masks of one rank's steps on a thread of its own; only this thread touches grammars."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the logits, which may be wider than the tokenizer, or narrower. Reads the file on the thread;
        without it, requests that have a grammar fail."""
        self._num_words = -(-vocab_size // 32)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tokens: Future[LLTokenizer] = self._thread.submit(load_tokens, tokenizer_json, eos_token_ids)

    def begin(self, constrained: Sequence[tuple[int, Chunk]]) -> Future[TokenMasks]:
        return self._thread.submit(self._masks, constrained)

    def _masks(self, constrained: Sequence[tuple[int, Chunk]]) -> TokenMasks:
        rows, errors = array("q"), {}
        masks: list[Tensor] = []
        for place, chunk in constrained:
            try:
                masks.append(self._mask(chunk))
                rows.append(place)
            except GrammarError as error:
                self._held.pop(chunk.request_id, None)
                errors[place] = f"{GRAMMAR_FAILED}{error}"
            except Exception as error:
                # A fault of the library, or of this code, must not fail another request.
                log.error("grammar_fault", request_id=chunk.request_id, exc_info=error)
                self._held.pop(chunk.request_id, None)
                errors[place] = f"its grammar's mask could not be made: {type(error).__name__}"
        while len(self._held) > max(_KEPT_MATCHERS, 2 * len(constrained)):
            self._held.popitem(last=False)
        allowed = torch.stack(masks) if masks else torch.empty((0, 0), dtype=torch.int32)
        return TokenMasks(rows, allowed[:, : self._num_words].contiguous(), errors)

    def _mask(self, chunk: Chunk) -> Tensor:
        """Return the words of one row. Raise GrammarError."""
        assert chunk.sampling is not None
        assert chunk.sampling.grammar is not None
        assert chunk.extras is not None
        assert chunk.extras.output is not None
        tokens = self._tokens.result()
        grammar, output = chunk.sampling.grammar, chunk.extras.output
        held = self._caught_up(chunk.request_id, tokens, grammar, output)
        mask = _mask_of(held.matcher, tokens)
        if held.shared and _has_full_lexer(held.matcher):
            # Requests that share a lexer fill it together, but no request may fail because of another one.
            self._compiled.pop(grammar, None)
            held = self._held[chunk.request_id] = _Held(compile_grammar(tokens, grammar), grammar, output, shared=False)
            held.matcher.consume_tokens(output.tolist())
            mask = _mask_of(held.matcher, tokens)
        if held.matcher.is_error():
            raise GrammarError(error_of(held.matcher))
        if not mask.any():
            raise GrammarError("no token of the model continues the output")
        return torch.from_numpy(_without(mask, chunk.extras.banned_token_ids).view(np.int32))

    def _caught_up(self, request_id: str, tokens: LLTokenizer, grammar: str, output: array[int]) -> _Held:
        """Return a matcher that has consumed the output, or failed at it, now the most recently used one."""
        held = self._held.pop(request_id, None)
        if held is None or held.grammar != grammar or output[: len(held.consumed)] != held.consumed:
            held = _Held(self._compile(tokens, grammar).deep_copy(), grammar, array("i"), shared=True)
        new = output[len(held.consumed) :]
        if new:
            held.matcher.consume_tokens(new.tolist())
            held.consumed = output
        self._held[request_id] = held
        return held

    def _compile(self, tokens: LLTokenizer, grammar: str) -> LLMatcher:
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = compile_grammar(tokens, grammar)
            if len(self._compiled) == _KEPT_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled[grammar] = compiled
        return compiled


def _has_full_lexer(matcher: LLMatcher) -> bool:
    """Return whether a matcher has failed at a limit of its lexer, not of its own parser."""
    return matcher.is_error() and matcher.get_error().startswith("lexer error")


def _mask_of(matcher: LLMatcher, tokens: LLTokenizer) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return one bit per token of the tokenizer, in words; zeros if the matcher has failed."""
    words = np.zeros(-(-tokens.vocab_size // 32), dtype=np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return words


def _without(
    mask: np.ndarray[tuple[int], np.dtype[np.uint32]], banned: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the mask without banned tokens; unchanged if it allows only banned tokens."""
    kept = mask.copy()
    for token in banned:
        if token // 32 < len(kept):
            kept[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
    return kept if kept.any() else mask
