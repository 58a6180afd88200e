"""The tiles with which a mixture-of-experts layer runs for a number of tokens. Torch-free.

A tile is chosen by rows per expert, T * k / E, among the tiles that fit the device. For weights of 16 bits the choice
was compared with a dozen other tiles at 1 to 8,192 tokens on an NVIDIA H200; for other formats nothing was.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

Projection = Literal["gate_up", "down"]
# packed: in a form of `kernels.gpu.packed_rows` in each layer, or plain in some of them; with activations of 16 or 32
# bits.
WeightFormat = Literal["float32", "float16", "bfloat16", "int8", "fp8", "int4", "packed", "packed_float32"]

# The most bits of a weight in any layer.
WEIGHT_BITS: dict[WeightFormat, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4}
WEIGHT_BITS |= {"packed": 16, "packed_float32": 32}
PACKED: tuple[WeightFormat, ...] = ("packed", "packed_float32")
# The weights of a row that are unpacked at a time, and the most whose low bits are loaded together.
_UNPACKED, MAX_CHUNK = 64, 128
# Columns of gate and up that are unpacked at a time where operands pass through registers.
_NARROW = 32
# Up to this many pairs are sorted in one launch, in which every program counts all pairs itself.
MAX_PAIRS_AT_ONCE = 4096

# Shared memory of each program beside its own; a program may have all of a multiprocessor's shared memory but this.
_RESERVED_BYTES = 1024
# Accumulators that a thread may hold before the compiler runs out of its 255 registers.
_MAX_ACCUMULATORS_PER_THREAD = 128
_SCALE_POINTERS_PER_THREAD = 32


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """A stored format of weights. group_size: values along K that share a scale, for int4, else 0.

    fp8_products: weights that a checkpoint has in FP8 in blocks of 128 columns multiply activations in fp8, which are
    rounded by row and 128 columns; else they are widened. The stored bytes are the same.
    """

    format: WeightFormat
    group_size: int = 0
    fp8_products: bool = False

    def name(self) -> str:
        return f"{self.format}-g{self.group_size}" if self.group_size else self.format


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Sizes of one layer's experts: E experts of width I over hidden size H, k per token, and the stored weight format.

    group_size: values along K that share a scale, for int4.
    """

    num_experts: int
    intermediate_size: int
    hidden_size: int
    top_k: int
    weights: WeightFormat
    group_size: int = 0

    def name(self) -> str:
        """Return the shape's name for errors and reports."""
        group = f"-g{self.group_size}" if self.group_size else ""
        sizes = f"e{self.num_experts}-i{self.intermediate_size}-h{self.hidden_size}-k{self.top_k}"
        return f"moe-{sizes}-{self.weights}{group}"

    def rows_per_expert(self, num_tokens: int) -> float:
        return num_tokens * self.top_k / self.num_experts


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one projection: output columns and depth per step, launch order, warps, steps loaded ahead."""

    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """block_m rows of one expert per tile in both projections, so that rows are sorted once."""

    block_m: int
    gate_up: Tile
    down: Tile


class MoeConfigs:
    """Chooses a layer's configuration by number of tokens."""

    def __init__(self, shape: MoeShape, shared_bytes: int, *, reads_tiles: bool = True) -> None:
        """shared_bytes, reads_tiles: see `kernels.gpu.device.Multiprocessor`."""
        self.shape = shape
        self._shared_bytes, self._reads_tiles = shared_bytes, reads_tiles
        self._chosen: dict[int, MoeConfig] = {}

    def __call__(self, num_tokens: int) -> MoeConfig:
        """Return the configuration. num_tokens: at least 1. Raises ValueError if none fits the device."""
        config = self._chosen.get(num_tokens)
        if config is None:
            config = config_for(self.shape, num_tokens, self._shared_bytes, reads_tiles=self._reads_tiles)
            self._chosen[num_tokens] = config
        return config

    def variant(self, num_tokens: int) -> tuple[MoeConfig, bool]:
        """Return the configuration, and whether pairs are counted in a launch of their own.

        Numbers of tokens with equal variants launch the same compiled kernels.
        """
        return self(num_tokens), num_tokens * self.shape.top_k > MAX_PAIRS_AT_ONCE


def config_for(shape: MoeShape, num_tokens: int, shared_bytes: int, *, reads_tiles: bool = True) -> MoeConfig:
    """Return a valid configuration for any shape, number of tokens and device. ValueError if none fits the device.

    shared_bytes, reads_tiles: see `kernels.gpu.device.Multiprocessor`.
    """
    block_m = min(block_m_of(shape.rows_per_expert(num_tokens)), 32 if WEIGHT_BITS[shape.weights] == 32 else 128)
    while block_m >= 16:
        gate_up = _first_that_fits(block_m, "gate_up", shape, shared_bytes, reads_tiles)
        down = _first_that_fits(block_m, "down", shape, shared_bytes, reads_tiles)
        if gate_up is not None and down is not None:
            return MoeConfig(block_m, gate_up, down)
        block_m //= 2
    raise ValueError(f"no tile of {shape.name()} fits {shared_bytes} bytes of shared memory")


def block_m_of(rows_per_expert: float) -> int:
    """Return the rows per tile, up to 128: twice the mean, since an expert's second tile reads its weights again."""
    return next((block for block in (16, 32, 64) if 2 * rows_per_expert <= block), 128)


def _first_that_fits(
    block_m: int, projection: Projection, shape: MoeShape, shared_limit: int, reads_tiles: bool
) -> Tile | None:
    """Return the first tile that fits, the widest first. Few rows need bytes in flight, so a deep step; many rows need
    a large product per step.

    A program with few rows waits for memory as it begins and for its results as it ends. Two such programs should fit a
    multiprocessor with three stages or more each, so that one computes meanwhile. With many rows one wide program of
    the down projection is faster than two: on an H200 418 us for 8,192 tokens of Qwen3-30B-A3B, by two 553.
    """
    few = block_m <= 32
    wide = projection == "down" and block_m >= 64 and shape.weights in ("float16", "bfloat16")
    widths, wanted = _wanted_sizes(shape, projection, few)
    narrow = shape.weights in PACKED and projection == "gate_up" and not few and not reads_tiles
    if narrow:
        # Both matrices are unpacked in registers, and so are the operands of their products: of more columns, or in
        # fewer threads, the compiler spills some.
        widths = tuple(width for width in widths if width <= _NARROW)
    if wide:
        widths = (256, *widths)
    depths = _depths(shape, projection, wanted)
    for block_n, block_k in itertools.product(widths, depths):
        columns = shape.intermediate_size if projection == "gate_up" else shape.hidden_size
        if block_n > max(16, _power_of_two(columns)):
            continue
        most = 64 * (_NARROW if narrow else 64 if shape.weights in PACKED else 128)  # outputs of four warps
        num_warps = 4 if block_m * block_n <= most else 8
        tiles = [Tile(block_n, block_k, 4 if few else 8, num_warps, num_stages) for num_stages in (4, 3, 2)]
        if few or (projection == "down" and not wide):
            tiles.sort(
                key=lambda tile: (
                    tile.num_stages < 3 or programs_that_fit(tile, block_m, projection, shape, shared_limit) < 2
                )
            )
        for tile in tiles:
            if fits(tile, block_m, projection, shape, shared_limit):
                return tile
    return None


def _wanted_sizes(shape: MoeShape, projection: Projection, few: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return widths and depths, the best first."""
    if WEIGHT_BITS[shape.weights] == 32:
        # Without tensor cores a product is unrolled over its depth: with a larger depth operands spill.
        return (32, 16), (32, 16)
    sizes = (128, 64, 32, 16)
    return sizes[1:] if projection == "gate_up" and few else sizes, sizes if few else sizes[1:]


def _depths(shape: MoeShape, projection: Projection, wanted: tuple[int, ...]) -> tuple[int, ...]:
    if shape.weights == "int4":
        return (shape.group_size,)
    depth = shape.hidden_size if projection == "gate_up" else shape.intermediate_size
    return tuple(block for block in wanted if block <= max(16, _power_of_two(depth)))


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def fits(tile: Tile, block_m: int, projection: Projection, shape: MoeShape, shared_limit: int) -> bool:
    """Return True if a tile can run on the device without planned spilling."""
    matrices = 2 if projection == "gate_up" else 1
    in_registers = matrices * block_m * tile.block_n // (32 * tile.num_warps)
    limit = _MAX_ACCUMULATORS_PER_THREAD
    if shape.weights == "int4":
        # The product of a group is held beside the accumulator until it is scaled, and each scale needs a pointer: two
        # registers for each of the quarter of the columns that a thread has.
        in_registers = 2 * in_registers + matrices * tile.block_n // 2
        limit += _SCALE_POINTERS_PER_THREAD
    if shape.weights in PACKED:
        # Unpacked weights are floats for a moment.
        in_registers += matrices * tile.block_n * _UNPACKED // (32 * tile.num_warps)
    # One int4 group per step: its scale belongs to the product of that step.
    whole_group = shape.weights != "int4" or tile.block_k == shape.group_size
    return (
        whole_group and shared_bytes(tile, block_m, projection, shape.weights) <= shared_limit and in_registers <= limit
    )


def shared_bytes(tile: Tile, block_m: int, projection: Projection, weights: WeightFormat) -> int:
    """Return the bytes of shared memory of the steps in flight: both operands, the weights twice for gate and up.

    Activations count as wide as unquantised weights. Quantised weights are widened in registers on their way to the
    dot, through one more buffer of the wide type.
    """
    wide = 4 if WEIGHT_BITS[weights] == 32 else 2
    matrices = 2 if projection == "gate_up" else 1
    stages = max(tile.num_stages, 1)
    stored = matrices * tile.block_n * tile.block_k
    widened = 0 if WEIGHT_BITS[weights] >= 16 else stored * wide
    if weights in PACKED:
        # A chunk of activations, and bytes of codes: the low bits once, the others for each of two parts.
        columns, widened = matrices * tile.block_n, matrices * tile.block_n * _UNPACKED * wide
        chunk = block_m * MAX_CHUNK * wide + columns * 3 * _UNPACKED
        return stages * max(chunk, (block_m * tile.block_k + columns * tile.block_k) * wide) + widened
    return stages * (block_m * tile.block_k * wide + stored * WEIGHT_BITS[weights] // 8) + widened


def programs_that_fit(tile: Tile, block_m: int, projection: Projection, shape: MoeShape, shared_limit: int) -> int:
    """Return the number of programs that fit a multiprocessor's shared memory at once.

    With up to 32 rows, which the tensor cores take from registers, one step fewer is held than there are stages.
    """
    held = replace(tile, num_stages=max(1, tile.num_stages - 1)) if block_m <= 32 else tile
    return (shared_limit + _RESERVED_BYTES) // (
        shared_bytes(held, block_m, projection, shape.weights) + _RESERVED_BYTES
    )
