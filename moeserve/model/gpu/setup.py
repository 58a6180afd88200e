"""Launch every kernel variant before serving, so that no request waits for the compiler.

A variant must follow from the model, the device and the few choices that `LaunchVariants` lists. Numbers that vary from
step to step (tokens, sequences, table widths) are arguments on which Triton does not specialise.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.gpu.moe_config import MoeConfigs
from kernels.gpu.moe_weights import GpuExperts
from kernels.gpu.packed_linear import FEW_ROWS
from kernels.sampling import Draw
from kernels.specs import Activation
from moeserve.model.decoder import Decoder, KvPools, StepDecoder
from moeserve.model.gpu.batches import AttentionLimits, Batches
from moeserve.model.spec import MoeSpec, Progress, silent
from moeserve.model.step_arrays import ExtendLimits, StepArrays, StepShape, share_prompts

# Maps a number of new tokens to a key that is equal for numbers with the same kernel variant.
Choice = Callable[[int], Hashable]
# Called before every launched step: ranks need the sizes of each other's steps.
BeginStep = Callable[[StepShape], None]
Clock = Callable[[Callable[[], object]], float]
# The shares of the largest step whose time is measured, as divisors.
_MEASURED_PARTS = (16, 4, 1)


def alone(_: StepShape) -> None:
    """Do nothing, as `BeginStep` of a single rank."""


def launch_variants(
    limits: AttentionLimits, configs: MoeConfigs | None, step: StepLimits, *, keeps_stored: bool = False
) -> LaunchVariants:
    """keeps_stored: see `GpuSettings`."""
    experts = None if configs is None else configs.variant

    def packed(num_rows: int) -> Hashable:
        return num_rows <= FEW_ROWS, None if experts is None else experts(num_rows)

    extends, sparse_layers = limits.extends(step.max_seqs), limits.spec.sparse_layers
    return LaunchVariants(step, limits.prefill, experts, extends, sparse_layers, packed if keeps_stored else None)


@torch.inference_mode()
def launch_all_variants(
    decoder: Decoder,
    kv_pools: KvPools,
    batches: Batches,
    variants: LaunchVariants,
    block_size: int,
    begin_step: BeginStep = alone,
    told: Progress = silent,
) -> None:
    """Launch every kernel of steps that are not captured and of sampling. Write no KV; read block 0 as it is."""
    steps = variants.steps()
    for number, shape in enumerate(steps):
        told("launching kernels", number, len(steps) + 1)
        launch_blank_step(decoder, kv_pools, batches, shape, block_size, begin_step)
    told("launching kernels", len(steps), len(steps) + 1)
    launch_all_draws(decoder)


def launch_all_draws(decoder: StepDecoder) -> None:
    """Launch every way of sampling, from logits in the decoder's dtype and from adjusted logits, which are fp32."""
    for dtype in {decoder.dtype, torch.float32}:
        logits = torch.zeros((1, decoder.spec.vocab_size), dtype=dtype, device=decoder.device)
        for draw in (Draw(0.0), Draw(1.0), Draw(1.0, top_k=1, top_p=0.5, min_p=0.5)):
            decoder.ops.sample(logits, [draw])


def launch_blank_step(
    decoder: Decoder,
    kv_pools: KvPools,
    batches: Batches,
    shape: StepShape,
    block_size: int,
    begin_step: BeginStep = alone,
) -> torch.Tensor:
    """Compute a step of this shape that stores no KV. Return its logits, which have no meaning."""
    begin_step(shape)
    arrays = blank_arrays(shape, block_size, decoder.spec.vocab_size)
    rows = range(arrays.num_rows - shape.num_logits, arrays.num_rows)
    return decoder.forward(batches.make(arrays, rows, None), kv_pools)


@torch.inference_mode()
def measure_steps(launch: Callable[[StepShape], object], max_tokens: int, clock: Clock) -> list[tuple[int, float]]:
    """Return tokens and seconds of steps with one prompt each, of up to `max_tokens` tokens; each is launched twice.

    clock: returns the seconds that a device takes for what a function launches.
    """
    measured = []
    for count in sorted({max(1, max_tokens // part) for part in _MEASURED_PARTS}):
        shape = StepShape(0, (count,), 1)
        launch(shape)  # The allocator gets memory for this size.
        measured.append((count, clock(partial(launch, shape))))
    return measured


def seconds_on_gpu(launch: Callable[[], object]) -> float:
    """Return the seconds that the current GPU takes for what `launch` queues."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def blank_arrays(shape: StepShape, block_size: int, vocab_size: int) -> StepArrays:
    """Return arrays of new sequences without slots for their KV. All block tables name block 0."""
    lengths = (1,) * shape.num_decodes + shape.prompt_lens
    arrays = StepArrays(num_decodes=shape.num_decodes, max_query_len=max(lengths))
    for length in lengths:
        # Spread tokens over the vocabulary, so that the gate spreads them over the experts.
        arrays.token_ids.extend(position * 31 % vocab_size for position in range(length))
        arrays.positions.extend(range(length))
        arrays.slots.extend([-1] * length)
        arrays.seq_lens.append(length)
        arrays.query_starts.append(arrays.num_rows)
        arrays.block_tables.append(array("i", [0] * -(-length // block_size)))
    return arrays


def launch_expert_variants(
    compute: Callable[[Tensor, Tensor, Tensor, GpuExperts, Activation], Tensor],
    experts: GpuExperts,
    decoder: Decoder,
    moe: MoeSpec,
    variant: Choice,
    max_rows: int,
    ids: Sequence[int],
) -> None:
    """Launch every variant of the experts' kernels for up to `max_rows` rows.

    Rows that arrive from other ranks follow no step's shape, so the steps of `launch_all_variants` do not cover them.
    experts: of any layer. ids: the expert ids that `compute` takes for that layer.
    """
    smallest = {variant(num_rows): num_rows for num_rows in range(max_rows, 0, -1)}
    for num_rows in smallest.values():
        x = torch.zeros((num_rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=decoder.device)
        places = torch.arange(num_rows * moe.gate.top_k).remainder(len(ids)).view(num_rows, -1)
        chosen = torch.tensor(ids)[places].to(decoder.device)
        compute(x, chosen, torch.zeros(chosen.shape, device=decoder.device), experts, moe.activation)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of a step: tokens, sequences, tokens of one sequence."""

    max_tokens: int
    max_seqs: int
    max_len: int


class LaunchVariants:
    """The variants of attention and experts that the steps of a model launch if they are not captured.

    prefill: the key for the longest prompt of a step that is not a short append-prefill. experts: the key for the rows
    of a step, None for a model without experts. extends: the limits of short append-prefills, None if there are none.
    sparse_layers: by layer, True if it has experts. packed: the key for the rows of products with quantised weights,
    None without any; weights of the last layer and of the output projection may have other formats than the rest.
    """

    def __init__(
        self,
        limits: StepLimits,
        prefill: Choice,
        experts: Choice | None,
        extends: ExtendLimits | None,
        sparse_layers: Sequence[bool],
        packed: Choice | None = None,
    ) -> None:
        self._limits, self._prefill, self._experts, self._extends = limits, prefill, experts, extends
        self._packed = packed
        self._all_rows, self._wanted_rows = any(sparse_layers[:-1]), sparse_layers[-1]

    def of_step(self, shape: StepShape) -> frozenset[Hashable]:
        """Return the variants of a step. Experts of the last layer compute only rows that need logits."""
        found: set[Hashable] = set()
        if shape.num_decodes:
            found.add("decode")
        run, longest = share_prompts(shape.prompt_lens, self._extends)
        if run is not None:
            found.add("extend")
        if longest:
            found.add(("prefill", self._prefill(longest)))
        if self._experts is not None:
            numbers = (shape.num_tokens * self._all_rows, shape.num_logits * self._wanted_rows)
            found |= {("experts", self._experts(rows)) for rows in numbers if rows}
        if self._packed is not None:
            found.add(("all rows", self._packed(shape.num_tokens)))
            if shape.num_logits:
                found.add(("wanted rows", self._packed(shape.num_logits)))
        return frozenset(found)

    def all(self) -> frozenset[Hashable]:
        """Return the variants of all steps within the limits."""
        return frozenset().union(*(self.of_step(shape) for shape in self._simple_steps()))

    def steps(self) -> list[StepShape]:
        """Return a few steps that together launch `all`, the largest first."""
        missing = set(self.all())
        chosen = []
        for shape in sorted(self._simple_steps(), key=lambda shape: -shape.num_tokens):
            launched = self.of_step(shape)
            if launched & missing:
                missing -= launched
                chosen.append(shape)
        return chosen

    def _simple_steps(self) -> Iterator[StepShape]:
        """Yield steps that together have the variants of all steps: every variant depends on one number alone.

        These are one decode, the longest possible prompts for every number of tokens, and as many prompts of one token
        as possible, which are too many for short append-prefills. If only the last layer has experts, all rows need
        logits.
        """
        limits, seen = self._limits, set[Hashable]()
        yield StepShape(1, (), 1)
        most = min(limits.max_seqs, limits.max_tokens)
        yield StepShape(0, (1,) * most, most)
        for num_tokens in range(1, limits.max_tokens + 1):
            whole, rest = divmod(num_tokens, limits.max_len)
            lengths = (limits.max_len,) * whole + ((rest,) if rest else ())
            if len(lengths) <= limits.max_seqs:
                yield StepShape(0, lengths, len(lengths) if self._all_rows else num_tokens)
                if self._packed is not None and (key := self._packed(num_tokens)) not in seen:
                    seen.add(key)
                    yield StepShape(0, lengths, num_tokens)
