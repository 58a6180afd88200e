"""Tokens and log probabilities of a step: a pure function of logits, sampling data, seed and position.

Everything is launched at once and waits for nothing; results are read on demand.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.ops import Ops
from kernels.sampling import Draw, softmax
from kernels.transfer import copied, to_device, to_host
from moeserve.model.decoder import StepDecoder
from moeserve.plan import Chunk, ChunkResult, SamplingParams, TokenLogprobs, row_chunks

NOT_FINITE = "the model produced logits that are not finite"
# Rows of logits that are scored together for a prompt's log probabilities.
SCORED_AT_ONCE = 256
# Rows that are penalised together: counts of every token of the vocabulary are kept for each.
_PENALISED_AT_ONCE = 32
# Below it a logit divided by the temperature may be infinite, and only the likeliest token is ever drawn.
_LEAST_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SampledStep:
    """The results of the chunks of a step: drawn tokens, None if no chunk draws one, and log probabilities of prompts
    by the chunk's place."""

    chunks: Sequence[Chunk]
    drawn: Drawn | None
    prompt_logprobs: dict[int, ScoredTokens]

    def results(self) -> list[ChunkResult]:
        """Return one result per chunk, after the device is done."""
        drawn = iter(() if self.drawn is None else self.drawn.results())
        results = []
        for number, chunk in enumerate(self.chunks):
            rows = [next(drawn) for _ in range(chunk.num_sampled_rows)]
            result = _while_right(chunk, rows) if rows else ChunkResult()
            if number in self.prompt_logprobs:
                result.prompt_logprobs = self.prompt_logprobs[number].all()
            results.append(result)
        return results


def _while_right(chunk: Chunk, rows: Sequence[ChunkResult]) -> ChunkResult:
    """Return the result of a sampled chunk from its rows' results, up to the first draft that is wrong.

    A row that is not finite ends it too: the next step computes it again, and fails.
    """
    result, further = rows[0], []
    token_id = result.token_id
    for draft, row in zip(chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :], rows[1:], strict=True):
        if token_id != draft or row.token_id is None:
            break
        token_id = row.token_id
        further.append((token_id, row.logprobs))
    result.further = tuple(further)
    return result


def sample_step(
    decoder: StepDecoder,
    chunks: Sequence[Chunk],
    places: Sequence[range],
    states: Tensor,
    logits: Tensor | None = None,
    previous: Tensor | None = None,
) -> SampledStep:
    """Launch sampling and scoring for the chunks, from states [S, H] of the rows that need logits.

    places: each chunk's range of these rows. logits: [S, vocab] of the states; None to compute only a few rows of
    logits at a time. previous: the tokens that the previous step drew, int64 on the device, needed if the history of a
    chunk lacks one of them.
    """
    drawing = [row for chunk in chunks if chunk.sampling is not None for row in row_chunks(chunk)]
    drawn = None
    if drawing:
        last = [row for chunk, place in zip(chunks, places, strict=True) for row in _sampled_rows(chunk, place)]
        of_rows = states if logits is None else logits
        if len(last) < len(of_rows):
            of_rows = of_rows[to_device(array("q", last), of_rows.device)]
        of_rows = decoder.logits(of_rows) if logits is None else of_rows
        drawn = draw_tokens(decoder.ops, of_rows, drawing, previous)
    prompt_logprobs = {}
    for number, (chunk, place) in enumerate(zip(chunks, places, strict=True)):
        if chunk.extras is not None and chunk.extras.prompt_targets:
            targets = chunk.extras.prompt_targets
            scored = states[place.start : place.start + len(targets)]
            prompt_logprobs[number] = ScoredTokens(decoder.logits, scored, targets, chunk.extras.num_top_logprobs)
    return SampledStep(chunks, drawn, prompt_logprobs)


def _sampled_rows(chunk: Chunk, place: range) -> range:
    return place[len(place) - chunk.num_sampled_rows :]


def draw_tokens(ops: Ops, logits: Tensor, chunks: Sequence[Chunk], previous: Tensor | None = None) -> Drawn:
    """Launch the draws for logits [S, V] (any float dtype). Row i belongs to `chunks[i]`, which has `sampling`.

    previous: see `sample_step`.
    """
    draws = [_draw_of(chunk) for chunk in chunks]
    adjusted = adjusted_logits(logits, chunks, previous)
    token_ids, largest = ops.sample(adjusted, draws)
    if adjusted is not logits:
        # A banned token may be the only finite one, so check the model's own logits.
        largest = logits.float().amax(-1)
    rows_of: dict[int, list[int]] = {}
    for row, chunk in enumerate(chunks):
        if chunk.sampling is not None and chunk.sampling.logprobs is not None:
            rows_of.setdefault(chunk.sampling.logprobs, []).append(row)
    logprobs: dict[int, tuple[Logprobs, int]] = {}
    for num_top, rows in rows_of.items():
        some_logits, some_ids = logits, token_ids
        if len(rows) < len(chunks):
            places = to_device(array("q", rows), logits.device)
            some_logits, some_ids = logits[places], token_ids[places]
        found = Logprobs(some_logits, some_ids, num_top)
        logprobs |= {row: (found, place) for place, row in enumerate(rows)}
    return Drawn(token_ids, to_host(token_ids), to_host(largest), logprobs)


def _draw_of(chunk: Chunk) -> Draw:
    sampling = chunk.sampling
    assert sampling is not None
    if sampling.temperature < _LEAST_TEMPERATURE:
        return Draw(0.0)
    position = chunk.start + len(chunk.token_ids)
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, position)


@dataclass(slots=True)
class Drawn:
    """The drawn tokens of a step.

    They lie on the device [S] int64 for the next step, and are copied to the host [S] with the rows' largest logits [S]
    fp32. Rows that want log probabilities have these too, with their places in them.
    """

    token_ids: Tensor
    home: Tensor
    largest: Tensor
    logprobs: dict[int, tuple[Logprobs, int]]

    def results(self) -> list[ChunkResult]:
        """Return one result per sampled chunk, after the device is done. A row that is not finite fails alone."""
        results = []
        for row, (token_id, largest) in enumerate(zip(self.home.tolist(), self.largest.tolist(), strict=True)):
            if not math.isfinite(largest):
                results.append(ChunkResult(error=NOT_FINITE))
            elif row in self.logprobs:
                found, place = self.logprobs[row]
                results.append(ChunkResult(token_id, found.of_row(place)))
            else:
                results.append(ChunkResult(token_id))
        return results


class Logprobs:
    """Log probabilities of one token per row of logits and of the row's likeliest tokens, on their way to the host."""

    def __init__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        """logits [S, V], token_ids [S] int64 on the same device."""
        logprobs = softmax(logits.float(), takes_logs=True)
        self._chosen = to_host(logprobs.gather(1, token_ids[:, None])[:, 0])
        self._top = tuple(to_host(part) for part in logprobs.topk(min(num_top, logits.shape[1]))) if num_top else None

    def of_row(self, row: int) -> TokenLogprobs:
        """Return a row's result, after the device is done."""
        value = float(self._chosen[row])
        if self._top is None:
            return TokenLogprobs(value)
        values, places = (part[row].tolist() for part in self._top)
        return TokenLogprobs(value, tuple(zip(places, values, strict=True)))


class ScoredTokens:
    """Log probabilities of the tokens that follow some states; only a few rows of logits exist at a time."""

    def __init__(
        self, logits_of: Callable[[Tensor], Tensor], states: Tensor, token_ids: array[int], num_top: int
    ) -> None:
        """states [S, H] and the S tokens."""
        targets = to_device(token_ids, states.device).long()
        self._parts = [
            (len(some), Logprobs(logits_of(some), some_targets, num_top))
            for some, some_targets in zip(states.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True)
        ]

    def all(self) -> list[TokenLogprobs]:
        """Return all results, after the device is done."""
        return [found.of_row(row) for count, found in self._parts for row in range(count)]


def adjusted_logits(logits: Tensor, chunks: Sequence[Chunk], previous: Tensor | None = None) -> Tensor:
    """Return a copy of logits [S, V] in fp32, adjusted as `chunks`, one per row, ask.

    Penalties come first, then biases, then bans, at last the masks of grammars. If no row asks for any, return the same
    tensor. A row's bits do not depend on other rows. previous: see `sample_step`.
    """
    penalised = [row for row, chunk in enumerate(chunks) if chunk.extras is not None and chunk.extras.history]
    places, biases, banned = _changes(chunks, logits.shape[1])
    masks = masks_of(chunks)
    if not (penalised or places or banned) and masks is None:
        return logits
    device = logits.device
    flat = logits.to(torch.float32, copy=True).view(-1)
    for first in range(0, len(penalised), _PENALISED_AT_ONCE):
        _penalise(flat, logits.shape[1], penalised[first : first + _PENALISED_AT_ONCE], chunks, previous)
    if places:
        # A row names a token once, so nothing is added twice.
        flat.index_add_(0, to_device(places, device), to_device(biases, device))
    if banned:
        flat.index_fill_(0, to_device(banned, device), -torch.inf)
    adjusted = flat.view(logits.shape)
    if masks is not None:
        forbid(adjusted, masks)
    return adjusted


def _changes(chunks: Sequence[Chunk], vocab_size: int) -> tuple[array[int], array[float], array[int]]:
    """Return biased places among all rows' logits, their biases, and banned places; masks are without banned tokens."""
    places, biases, banned = array("q"), array("f"), array("q")
    for row, chunk in enumerate(chunks):
        first = row * vocab_size
        if chunk.sampling is not None and chunk.sampling.logit_bias:
            places.extend(first + token for token in chunk.sampling.logit_bias)
            biases.extend(chunk.sampling.logit_bias.values())
        if chunk.extras is not None and chunk.extras.mask is None:
            banned.extend(first + token for token in chunk.extras.banned_token_ids)
    return places, biases, banned


def _penalise(
    flat: Tensor, vocab_size: int, rows: Sequence[int], chunks: Sequence[Chunk], previous: Tensor | None
) -> None:
    """Change the logits [S * V] of tokens that occurred in the histories (prompt, then output) of some rows.

    Repetition (Keskar et al., 2019) divides positive and multiplies negative logits of every token seen; presence and
    frequency subtract once, or once per occurrence, for tokens of the output.
    """
    device = flat.device
    joined, lengths, num_prompt, samplings = array("i"), array("q"), array("q"), list[SamplingParams]()
    # Tokens of histories that only the device knows: their places in `joined`, and among the previous step's tokens.
    unknown, sources = array("q"), array("q")
    for row in rows:
        sampling, extras = chunks[row].sampling, chunks[row].extras
        assert sampling is not None
        assert extras is not None
        assert extras.history is not None
        joined.extend(extras.history)
        drawn_by = chunks[row].drawn_by
        if drawn_by is not None:
            unknown.append(len(joined))
            sources.append(drawn_by)
            joined.append(0)
        lengths.append(len(extras.history) + (drawn_by is not None))
        num_prompt.append(extras.num_prompt_tokens)
        samplings.append(sampling)

    num_tokens = to_device(lengths, device)
    row_of = torch.repeat_interleave(num_tokens, output_size=len(joined))
    token_ids = to_device(joined, device).long()
    if sources:
        if previous is None:
            raise ValueError("histories lack tokens of a previous step, and there is none")
        token_ids.index_copy_(0, to_device(unknown, device), previous.index_select(0, to_device(sources, device)))
    place_in_row = torch.arange(len(joined), device=device) - (num_tokens.cumsum(0) - num_tokens)[row_of]
    is_output = place_in_row >= to_device(num_prompt, device)[row_of]
    # Whole numbers, whose sum does not depend on the order.
    in_counts = row_of * vocab_size + token_ids
    counts = torch.zeros(len(rows) * vocab_size, device=device).index_add_(0, in_counts, is_output.float())[in_counts]

    def of_token(values: Sequence[float]) -> Tensor:
        return to_device(array("f", values), device)[row_of]

    repetition = of_token([sampling.repetition_penalty for sampling in samplings])
    presence = of_token([sampling.presence_penalty for sampling in samplings])
    frequency = of_token([sampling.frequency_penalty for sampling in samplings])
    places = to_device(array("q", rows), device)[row_of] * vocab_size + token_ids
    found = flat[places]
    found = torch.where(found > 0, found / repetition, found * repetition)
    # If a token occurs several times, the same value is written each time.
    flat.index_copy_(0, places, torch.where(counts > 0, found - (presence + frequency * counts), found))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of some rows of a step.

    rows: their places among the step's sampled chunks. allowed: [len(rows), W] int32 on the host; bit b of word w
    stands for token 32 w + b, and tokens beyond the last word are forbidden.
    """

    rows: array[int]
    allowed: Tensor


def masks_of(chunks: Sequence[Chunk]) -> TokenMasks | None:
    """Return the masks of sampled chunks, one per row of logits; None if no chunk has one."""
    masks = [None if chunk.extras is None else chunk.extras.mask for chunk in chunks]
    rows = array("q", (row for row, mask in enumerate(masks) if mask is not None))
    if not rows:
        return None
    words = torch.frombuffer(bytearray().join(mask for mask in masks if mask is not None), dtype=torch.int32)
    return TokenMasks(rows, words.view(len(rows), -1))


def forbid(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [S, V] (fp32) of forbidden tokens to -inf, in place."""
    device, vocab_size = logits.device, logits.shape[1]
    words = copied(masks.allowed, device)
    changes = _changes_of_byte(device).index_select(0, words.view(torch.uint8).view(-1).int()).view(len(words), -1)
    known = min(changes.shape[1], vocab_size)
    if len(words) == len(logits) and known == vocab_size:
        logits.add_(changes[:, :known])
        return
    rows = to_device(masks.rows, device)
    logits[:, :known].index_add_(0, rows, changes[:, :known])
    if known < vocab_size:
        logits[:, known:].index_fill_(0, rows, -torch.inf)


@cache
def _changes_of_byte(device: torch.device) -> Tensor:
    """Return [256, 8] fp32: the numbers that a byte of a mask adds to the logits of its eight tokens."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
