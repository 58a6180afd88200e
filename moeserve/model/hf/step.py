"""The rows of the step that is being computed, as transformers' modelling code meets them: masks, slots, lanes.

A lane is one request's chunk. Modelling code sees all lanes as one text of T tokens; modules that mix tokens look here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from kernels.state_rows import StateRows
from moeserve.model.hf.geometry import LayerMemory

# The name under which transformers finds our attention and masks.
PAGED = "moeserve_paged"

# A mask is tried out at this number of positions from the start and around its window, to find its kind.
_NEAR = 24


@dataclass(frozen=True, slots=True)
class Lane:
    """Rows first..last - 1 of a step, which are its request's tokens from position `start` on.

    slots: [start + count] int64, of all tokens up to the end of this step. state: the request's state slot.
    shared: data that layers of this request pass to each other during the step. window_slots: like `slots`, for layers
    with window blocks; None without such layers. Where no row of the lane sees a token, its entry belongs to another
    token.
    """

    first: int
    last: int
    start: int
    slots: Tensor
    state: int
    shared: dict[str, Any] = field(default_factory=dict)
    window_slots: Tensor | None = None

    def slots_in(self, memory: LayerMemory) -> Tensor:
        """Return the slots of the request's tokens in the memory of a layer."""
        return self.window_slots if memory.windowed and self.window_slots is not None else self.slots

    def cut(self) -> Lane:
        """Return this lane without the slots behind its end."""
        windows = None if self.window_slots is None else self.window_slots[: self.end]
        return replace(self, slots=self.slots[: self.end], window_slots=windows)

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def end(self) -> int:
        return self.start + self.count


@runtime_checkable
class StepRows(Protocol):
    """The rows of a step as the operations of attention take them: `PagedRows`, or `SequencesByShape` on a GPU."""

    @property
    def slots(self) -> Tensor: ...

    @property
    def plan(self) -> AttentionPlan: ...


@dataclass(slots=True)
class Step:
    """The step that a decoder computes now; its decoder fills it in and all parts of the model look here.

    attention: the rows' places in the KV memory. windows: the rows' places for layers with window blocks, None without.
    pools: the KV memory [heads, num_slots, dim], as `LayerMemory.pools` numbers it. state_pools: by layer and name,
    states [num_rows, ...]. state_rows: which rows of the step belong to which states, None without states. written: by
    id of a layer's keys, the keys and the memory of the layer that stored them. angles: by id of rotary embeddings, the
    embeddings and their angles as our kernels take them. kinds: by key of a mask, its kind.
    """

    attention: StepRows = field(
        default_factory=lambda: PagedRows(torch.empty(0, dtype=torch.int64), AttentionPlan((), 1))
    )
    windows: StepRows | None = None
    pools: Sequence[Tensor] = ()
    state_pools: Sequence[Mapping[str, Tensor]] = ()
    state_rows: StateRows | None = None
    written: dict[int, tuple[Tensor, LayerMemory]] = field(default_factory=dict)
    angles: dict[int, tuple[Tensor, tuple[Tensor, Tensor] | None]] = field(default_factory=dict)
    running: bool = False
    kinds: dict[object, MaskKind] = field(default_factory=dict)
    _lanes: list[Lane] | None = None

    def begin(
        self,
        attention: StepRows,
        windows: StepRows | None,
        pools: Sequence[Tensor],
        state_pools: Sequence[Mapping[str, Tensor]] = (),
        state_rows: StateRows | None = None,
    ) -> None:
        self.attention, self.windows = attention, windows
        self.pools, self.state_pools, self.state_rows = pools, state_pools, state_rows
        self._lanes, self.running = None, True

    def end(self) -> None:
        """Forget the step's tensors."""
        self._lanes, self.running, self.pools, self.state_pools = None, False, (), ()
        self.written.clear()
        self.angles.clear()

    @property
    def num_rows(self) -> int:
        return len(self.attention.slots)

    def paged(self, memory: LayerMemory) -> StepRows:
        return self.windows if memory.windowed and self.windows is not None else self.attention

    @property
    def lanes(self) -> list[Lane]:
        if self._lanes is None:
            self._lanes, first, plan = [], 0, self.attention.plan
            states = [] if self.state_rows is None else self.state_rows.slots.tolist()
            for number, chunk in enumerate(plan.chunks):
                slots, windows = self._all_slots(chunk, plan.block_size), None
                if self.windows is not None:
                    windows = self._all_slots(self.windows.plan.chunks[number], plan.block_size)
                state = states[number] if states else -1
                lane = Lane(first, first + chunk.num_tokens, chunk.start, slots, state, window_slots=windows)
                self._lanes.append(lane)
                first += chunk.num_tokens
        return self._lanes

    def _all_slots(self, chunk: ChunkSpan, block_size: int) -> Tensor:
        """Return the slots [L] of all tokens of a request up to the end of its chunk."""
        blocks = torch.frombuffer(chunk.block_ids, dtype=torch.int32).long()
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
        return slots[: chunk.start + chunk.num_tokens].to(self.attention.slots.device)

    def kind_of(self, mask: RowMask) -> MaskKind:
        if mask.key is None:
            return MaskKind(None, causal=False)
        if mask.key not in self.kinds:
            self.kinds[mask.key] = _try_out(mask)
        return self.kinds[mask.key]

    def angles_of(self, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return cos, sin [T, R/2] of embeddings [1, T, R] that hold each angle twice; None for other embeddings."""
        known = self.angles.get(id(embeddings[0]))
        if known is None:
            # Keep the embeddings, so that no others get their id.
            known = self.angles[id(embeddings[0])] = embeddings[0], _halves(embeddings)
        return known[1]


@dataclass(frozen=True, slots=True)
class MaskKind:
    """A mask that a kernel knows: causal or not, with or without a window."""

    window: int | None
    causal: bool = True


class RowMask:
    """Stands for the mask of a step on its way through modelling code.

    function(batch, head, query, key) tells whether a query sees a key, by their absolute positions in one request.
    """

    def __init__(self, function: Callable[..., Tensor], local_size: int | None) -> None:
        self.function, self.local_size = function, local_size
        self.key = _identity(function, local_size)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which keys each query sees: [Q] and [K] int64 positions -> [1, 1, Q, K] bool."""
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=queries.device)
        seen: Tensor = self.function(zero, zero, queries[None, None, :, None], keys[None, None, None, :])
        return seen.expand(1, 1, len(queries), len(keys))

    def additive(self, lane: Lane, dtype: torch.dtype, first_key: int = 0) -> Tensor:
        """Return [1, 1, rows of the lane, keys] to be added to scores. first_key: the position of the first key."""
        device = lane.slots.device
        places = torch.arange(lane.end, device=device)
        seen = self.seen(places[lane.start :], places[first_key:])
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)


def _halves(embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    num_angles = embeddings[0].shape[-1] // 2
    halves = [part for tensor in embeddings for part in tensor[0].split(num_angles, -1)]
    if embeddings[0].dim() != 3 or len(halves) != 4 or embeddings[0].shape != embeddings[1].shape:
        return None
    if not (torch.equal(halves[0], halves[1]) and torch.equal(halves[2], halves[3])):
        return None
    return halves[0].contiguous(), halves[2].contiguous()


def _make_mask(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> RowMask:
    """Implement transformers' mask interface."""
    return RowMask(mask_function, local_size)


AttentionMaskInterface.register(PAGED, _make_mask)


def _try_out(mask: RowMask) -> MaskKind:
    size = mask.local_size
    places = set(range(_NEAR))
    if size is not None:
        places |= {place + offset for place in (size, 2 * size) for offset in range(-2, _NEAR) if place + offset >= 0}
    positions = torch.tensor(sorted(places))
    seen = mask.seen(positions, positions)[0, 0]
    distance = positions[:, None] - positions[None, :]
    for window in (None, size):
        expected = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        if torch.equal(seen, expected):
            return MaskKind(window)
    return MaskKind(None, causal=False)


def _identity(function: Any, local_size: int | None) -> object | None:
    """Return a key that is equal for functions of the same code over the same numbers; None if one is over tensors."""
    parts: list[object] = [getattr(function, "__code__", None), local_size]
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for part in content if isinstance(content, tuple) else (content,):
            if callable(part):
                inner = _identity(part, None)
                if inner is None:
                    return None
                parts.append(inner)
            elif isinstance(part, int | None):
                parts.append(part)
            else:
                return None
    return tuple(parts)
