"""The check at load: which ways of calling mixers give the numbers of the model's own forward.

A few requests of up to two dozen tokens go through the loaded model: first each by itself as transformers would
generate, then in our steps. Where the model changes its behaviour later in a text, they go through it once more with
these limits set low (`low_limits`): a window, an attention chunk or a temperature that grows with the position begins
thousands of tokens into a text. This finds faults in the modelling code of any model type.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from experts.errors import CollectiveError, ExpertStoreError
from moeserve.model.decoder import ForwardBatch, KvPools
from moeserve.model.hf.mixers import ALL_WAYS, Ways
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.kv_pool import KVPool
from moeserve.model.paged_batch import make_batch
from moeserve.model.spec import ModelError, ModelSpec, UnsupportedModel
from moeserve.model.state_pool import StatePool
from moeserve.plan import Chunk, StateUse

BLOCK_SIZE = 4
MAX_LEN, MAX_ROWS = 32, 32  # tokens of a text, and rows of a step, at most
# The lengths of the prompts, and the number of tokens that follow one by one.
_PROMPTS, _MORE = (19, 7, 12), 3
# (request, tokens) of each step: chunks of several sizes, lone tokens of a prompt, requests that join and leave.
_ALONE_IN_CHUNKS = (((0, 8),), ((0, 1),), ((0, 10),), ((0, 1),), ((0, 1),), ((0, 1),))
_ALONE_IN_ONE = (((0, 19),), ((0, 1),), ((0, 1),), ((0, 1),))
_IN_A_BATCH = (
    ((0, 5), (1, 7)),
    ((1, 1), (0, 1), (2, 6)),
    ((0, 9), (2, 6), (1, 1)),
    ((2, 1), (1, 1), (0, 4)),
    ((2, 1), (0, 1)),
    ((0, 1), (2, 1)),
    ((0, 1),),
)
_SCENES = (
    (_ALONE_IN_ONE, "a prompt that is computed over paged memory"),
    (_ALONE_IN_CHUNKS, "a prompt that is computed in several pieces"),
    (_IN_A_BATCH, "a request that is computed beside others"),
)
# Largest difference, in parts of the spread of logits. Rounding in 16 bits also changes which experts are chosen.
_TOLERANCES = {torch.float32: 2e-3, torch.float16: 0.2, torch.bfloat16: 0.4}


class CheckedDecoder(Protocol):
    """The part of `moeserve.model.hf.decoder.TransformersDecoder` that the check uses; see there for the methods."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def own_states(self, pieces: Sequence[Sequence[int]]) -> Iterator[Tensor]: ...

    def states(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...

    def can_use(self, ways: Ways) -> bool: ...

    def use(self, ways: Ways) -> None: ...

    @property
    def has_far_limits(self) -> bool: ...

    def low_limits(self) -> AbstractContextManager[None]: ...

    def arrange_pools(self, kv_layers: KvPools, state_pool: StatePool | None) -> KvPools: ...


# Tells the other ranks, which compute the same, the number of rows of the next step.
BeginStep = Callable[[int], None]
# Makes a batch of chunks over blocks of `BLOCK_SIZE` tokens on the decoder's device; the given rows need logits.
MakeBatch = Callable[[Sequence[Chunk], Sequence[int]], ForwardBatch]


@dataclass(frozen=True, slots=True)
class _Case:
    """Texts, and for each text the logits [_MORE + 1, vocab] after its prompt and after each further token.

    limits: under which they are computed.
    """

    texts: Sequence[Sequence[int]]
    wanted: Sequence[Tensor]
    limits: Callable[[], AbstractContextManager[None]]


def batch_on_cpu(chunks: Sequence[Chunk], logit_rows: Sequence[int]) -> ForwardBatch:
    """Implement `MakeBatch`."""
    return make_batch(chunks, BLOCK_SIZE, logit_rows, has_states=chunks[0].state is not None)


@torch.inference_mode()
def choose_ways(
    decoder: CheckedDecoder, begin_step: BeginStep = lambda _: None, batch_of: MakeBatch = batch_on_cpu
) -> Ways:
    """Set the decoder to the cheapest ways that pass, and return them. Several ranks do so together.

    Raise UnsupportedModel, whose sentence names the fault, if no ways pass.
    """
    cases = [_own_answers(decoder, begin_step, nullcontext)]
    if decoder.has_far_limits:
        cases.append(_own_answers(decoder, begin_step, decoder.low_limits))
    faults = []
    for ways in ALL_WAYS:
        if not decoder.can_use(ways):
            continue
        decoder.use(ways)
        fault = _fault(decoder, cases, begin_step, batch_of)
        if fault is None:
            return ways
        faults.append(fault)
    # The first of the ways that got furthest.
    _, scene, seen = max(faults, key=lambda fault: fault[0])
    raise UnsupportedModel(
        f"Models of type {decoder.spec.model_type!r} cannot be served: with transformers' code {scene} gets other "
        f"numbers than one computed by itself in one piece ({seen})."
    )


def _own_answers(
    decoder: CheckedDecoder, begin_step: BeginStep, limits: Callable[[], AbstractContextManager[None]]
) -> _Case:
    draw = torch.Generator().manual_seed(5)
    vocab = decoder.spec.vocab_size
    texts = [torch.randint(vocab // 8, vocab, (n + _MORE,), generator=draw).tolist() for n in _PROMPTS]
    wanted = []
    for text, count in zip(texts, _PROMPTS, strict=True):
        pieces = [text[:count], *([token] for token in text[count:])]
        answers, last = decoder.own_states(pieces), []
        with limits():
            for piece in pieces:
                begin_step(len(piece))
                last.append(next(answers)[-1:])
        wanted.append(decoder.logits(torch.cat(last)))
    return _Case(texts, wanted, limits)


def _fault(
    decoder: CheckedDecoder, cases: Sequence[_Case], begin_step: BeginStep, batch_of: MakeBatch
) -> tuple[int, str, str] | None:
    """Return the index of the first scene that fails, its name and the fault; None if all pass."""
    scenes = [(case, steps, name) for case in cases for steps, name in _SCENES]
    for place, (case, steps, name) in enumerate(scenes):
        try:
            with case.limits():
                played = list(_play(decoder, steps, case, begin_step, batch_of))
            worst = max((found - wanted).abs().max().item() for found, wanted in played)
        except (CollectiveError, ExpertStoreError, ModelError):  # Not faults of the ways.
            raise
        except Exception as error:  # Modelling code may raise any exception.
            return place, name, " ".join(f"{type(error).__name__}: {error}".split())[:200]
        spread = max(wanted.float().std().item() for wanted in case.wanted)
        if not worst <= _TOLERANCES[decoder.dtype] * max(spread, 1e-3):
            return place, name, f"logits differ by {worst:.1e} where they spread over {spread:.1e}"
    return None


def _play(
    decoder: CheckedDecoder,
    steps: Sequence[Sequence[tuple[int, int]]],
    case: _Case,
    begin_step: BeginStep,
    batch_of: MakeBatch,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits that steps give after prompts and further tokens, each with the expected logits."""
    memory = _Memory(decoder, case.texts, batch_of)
    done = [0] * len(case.texts)
    for step in steps:
        chunks = [(request, done[request], done[request] + count) for request, count in step]
        begin_step(sum(count for _, count in step))
        rows = decoder.logits(decoder.states(memory.batch(chunks), memory.pools))
        for (request, _, end), row in zip(chunks, rows, strict=True):
            done[request] = end
            place = end - _PROMPTS[request]
            if place >= 0:
                yield row, case.wanted[request][place]


class _Memory:
    """Blocks in scattered order and a state slot for each text."""

    def __init__(self, decoder: CheckedDecoder, texts: Sequence[Sequence[int]], batch_of: MakeBatch) -> None:
        self._texts, self._batch_of = texts, batch_of
        counts = [-(-len(text) // BLOCK_SIZE) for text in texts]
        num_blocks = sum(counts) + 1
        order = [(7 * place) % num_blocks for place in range(num_blocks)]
        if len(set(order)) < num_blocks:
            order = list(range(num_blocks))
        self._tables = [array("i", [order.pop() for _ in range(count)]) for count in counts]
        kv = KVPool(decoder.spec.kv_layers, num_blocks, BLOCK_SIZE, decoder.dtype, decoder.device)
        layers = decoder.spec.state_layers
        self._has_states = bool(layers)
        states = StatePool(layers, len(texts) + 1, decoder.dtype, decoder.device) if layers else None
        self.pools = decoder.arrange_pools(kv.layers, states)

    def batch(self, chunks: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        """chunks: (request, first token, end). The last row of each chunk needs logits."""
        made, num_rows, last_rows = [], 0, []
        for request, start, end in chunks:
            token_ids = array("i", self._texts[request][start:end])
            state = StateUse(request) if self._has_states else None
            made.append(Chunk("", token_ids, start, self._tables[request], None, state=state))
            num_rows += end - start
            last_rows.append(num_rows - 1)
        return self._batch_of(made, last_rows)


# The limits: fields of configurations, and of modules that copy them.
_LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale")
# Tokens; above the block size of the check, below the length of its texts.
_LOW = 6


def has_far_limits(code: ModellingCode) -> bool:
    """Return whether the model has limits that short texts do not reach."""
    return any(_is_far(getattr(code.config, name, None)) for name in _LIMITS)


@contextmanager
def low_limits(code: ModellingCode) -> Iterator[None]:
    """Set all far limits of the configuration and of the modules to a few tokens, and restore them at the end."""
    changed: list[tuple[Any, str, int | float]] = []
    for owner in (code.config, *code.body.modules()):
        for name in _LIMITS:
            # Not `getattr`: a module finds its configuration's fields under other names too.
            value = vars(owner).get(name)
            if _is_far(value):
                changed.append((owner, name, value))
                setattr(owner, name, type(value)(_LOW))
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _is_far(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > _LOW
