"""Which kernels a mixture-of-experts layer runs with for a number of tokens, and with which tiles. Torch-free.

A tile is chosen by rows per expert, T * k / E, and only among those that fit the device. `moeserve tune` measures which
configuration is fastest; the heuristic here only gives one that runs.

Measured configurations lie in files, each for one GPU, one shape, one weight format and one minor version of Triton.
They come with the package (`kernels/gpu/tuned`) and from `moeserve tune`. If none fits, the heuristic is used, and the
log says so. Attention keeps its configurations in files of the same kind (`kernels.gpu.attention_config`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

# gemv: rows one by one, a token's choices summed in one program. gemv_split: a program per choice, summed afterwards.
# tiled: rows sorted by expert, a program per tile. persistent: the same, a program per multiprocessor.
Variant = Literal["gemv", "gemv_split", "tiled", "persistent"]
Projection = Literal["gate_up", "down"]
WeightFormat = Literal["float32", "float16", "bfloat16", "int8", "fp8", "int4"]
Key = TypeVar("Key")
Config = TypeVar("Config")

WEIGHT_BITS: dict[WeightFormat, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "fp8": 8, "int4": 4}
TUNED_NUM_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MAX_CANDIDATES = 24
# Up to this many pairs are sorted in one launch, in which every program counts all pairs itself.
MAX_PAIRS_AT_ONCE = 4096
PACKAGED = Path(__file__).parent / "tuned"

# Programs per multiprocessor that keep the memory busy if each program waits for one load after the other.
_PROGRAMS_THAT_FILL = 4
# Shared memory of each program beside its own; a program may have all of a multiprocessor's shared memory but this.
_RESERVED_BYTES = 1024
# Accumulators that a thread may hold before the compiler runs out of its 255 registers.
_MAX_ACCUMULATORS_PER_THREAD = 128
_SCALE_POINTERS_PER_THREAD = 32
_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """A stored format of weights. group_size: values along K that share a scale, for int4, else 0."""

    format: WeightFormat
    group_size: int = 0

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
        """Return the shape's name in tuned files."""
        group = f"-g{self.group_size}" if self.group_size else ""
        sizes = f"e{self.num_experts}-i{self.intermediate_size}-h{self.hidden_size}-k{self.top_k}"
        return f"moe-{sizes}-{self.weights}{group}"

    def rows_per_expert(self, num_tokens: int) -> float:
        return num_tokens * self.top_k / self.num_experts


@dataclass(frozen=True, slots=True)
class Device:
    """Limits of a GPU: shared memory of one program in bytes, multiprocessors, tensor descriptors."""

    shared_bytes: int
    num_multiprocessors: int
    has_descriptors: bool


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
    """block_m rows of one expert per tile in both projections, so that rows are sorted once; 1 without tiles."""

    variant: Variant
    block_m: int
    gate_up: Tile
    down: Tile

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> MoeConfig:
        """Invert `to_dict`. Raises TypeError or KeyError for fields that are missing or unknown."""
        if fields["variant"] not in get_args(Variant):
            raise KeyError(fields["variant"])
        return MoeConfig(fields["variant"], int(fields["block_m"]), Tile(**fields["gate_up"]), Tile(**fields["down"]))


@dataclass(frozen=True, slots=True)
class Platform:
    """gpu: the device's name as its driver gives it. triton: its version; only major and minor count."""

    gpu: str
    triton: str


class TuningError(Exception):
    """A tuned file cannot be used. The message names the file and the reason."""


class MoeConfigs:
    """Chooses a layer's configuration by number of tokens: a measured one if there is one, else the heuristic's.

    folders: the folders of tuned files; the first file that fits is used. The first call reads them and logs the
    choice.
    """

    def __init__(
        self, shape: MoeShape, device: Device, platform: Platform, folders: Sequence[Path] = (PACKAGED,)
    ) -> None:
        self.shape = shape
        self._device = device
        self._platform = platform
        self._folders = folders
        self._tuned: dict[int, MoeConfig] | None = None
        self._chosen: dict[int, MoeConfig] = {}

    def __call__(self, num_tokens: int) -> MoeConfig:
        """Return the configuration. num_tokens: at least 1. Raises ValueError if none fits the device."""
        config = self._chosen.get(num_tokens)
        if config is None:
            if self._tuned is None:
                self._tuned = self._read()
            if self._tuned:
                config = nearest(num_tokens, self._tuned)
            else:
                config = heuristic_config(self.shape, num_tokens, self._device)
            self._chosen[num_tokens] = config
        return config

    def variant(self, num_tokens: int) -> tuple[MoeConfig, bool]:
        """Return the configuration, and whether pairs are counted in a launch of their own.

        Numbers of tokens with equal variants launch the same compiled kernels.
        """
        return self(num_tokens), num_tokens * self.shape.top_k > MAX_PAIRS_AT_ONCE

    def _read(self) -> dict[int, MoeConfig]:
        def read(path: Path) -> dict[int, MoeConfig]:
            return read_tuned(path, self.shape, self._platform, self._device)

        return first_file(self._folders, self.shape, self._platform, read) or {}


def nearest(num_tokens: int, tuned: Mapping[int, MoeConfig]) -> MoeConfig:
    """Return the configuration of the nearest number of tokens, by ratio; of two equally near ones the larger."""
    return tuned[min(tuned, key=lambda tokens: (abs(math.log(tokens / num_tokens)), -tokens))]


def heuristic_config(shape: MoeShape, num_tokens: int, device: Device) -> MoeConfig:
    """Return a valid configuration for any shape, number of tokens and device. ValueError if none fits the device."""
    variant = variant_of(shape, num_tokens, device)
    if variant in ("gemv", "gemv_split"):
        return MoeConfig(variant, 1, _gemv_tile(shape, "gate_up"), _gemv_tile(shape, "down"))
    block_m = min(block_m_of(shape.rows_per_expert(num_tokens)), 32 if shape.weights == "float32" else 128)
    while block_m >= 16:
        tiles = [_first_that_fits(block_m, projection, shape, device) for projection in ("gate_up", "down")]
        if tiles[0] is not None and tiles[1] is not None:
            return MoeConfig(variant, block_m, tiles[0], tiles[1])
        block_m //= 2
    raise ValueError(f"no tile of {shape.name()} fits {device.shared_bytes} bytes of shared memory")


def variant_of(shape: MoeShape, num_tokens: int, device: Device) -> Variant:
    """Choose by rows per expert: one by one if most experts have at most one row, else in tiles."""
    if num_tokens * shape.top_k * 4 <= shape.num_experts or num_tokens == 1:
        programs = num_tokens * shape.hidden_size // _gemv_tile(shape, "down").block_n
        return "gemv" if programs >= _PROGRAMS_THAT_FILL * device.num_multiprocessors else "gemv_split"
    if allows_persistent(shape, device) and num_tokens >= 1024 and shape.rows_per_expert(num_tokens) >= 64:
        return "persistent"
    return "tiled"


def allows_persistent(shape: MoeShape, device: Device) -> bool:
    """Return True if the persistent variant can run: descriptors, rows of 16-byte multiples, neither fp32 nor int4."""
    bits = WEIGHT_BITS[shape.weights]
    aligned = all(size * bits % 128 == 0 and size % 8 == 0 for size in (shape.hidden_size, shape.intermediate_size))
    return device.has_descriptors and bits in (8, 16) and aligned


def block_m_of(rows_per_expert: float) -> int:
    """Return the rows per tile, up to 128: twice the mean, since an expert's second tile reads its weights again."""
    return next((block for block in (16, 32, 64) if 2 * rows_per_expert <= block), 128)


def _first_that_fits(block_m: int, projection: Projection, shape: MoeShape, device: Device) -> Tile | None:
    """Return the first tile that fits, the widest first. Few rows need bytes in flight, so a deep step; many rows need
    a large product per step.

    A program with few rows, or of the short down projection, waits for memory as it begins and for its results as it
    ends. Two such programs should fit a multiprocessor with three stages or more each, so that one computes meanwhile.
    """
    few = block_m <= 32
    widths, wanted = _wanted_sizes(shape, projection, few)
    depths = _depths(shape, projection, wanted)
    for block_n, block_k in itertools.product(widths, depths):
        columns = shape.intermediate_size if projection == "gate_up" else shape.hidden_size
        if block_n > max(16, _power_of_two(columns)):
            continue
        num_warps = 4 if block_m * block_n <= 64 * 128 else 8
        tiles = [Tile(block_n, block_k, 4 if few else 8, num_warps, num_stages) for num_stages in (4, 3, 2)]
        if few or projection == "down":
            tiles.sort(
                key=lambda tile: tile.num_stages < 3 or programs_that_fit(tile, block_m, projection, shape, device) < 2
            )
        for tile in tiles:
            if fits(tile, block_m, projection, shape, device):
                return tile
    return None


def _wanted_sizes(shape: MoeShape, projection: Projection, few: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return widths and depths, the best first."""
    if shape.weights == "float32":
        # Without tensor cores a product is unrolled over its depth: with a larger depth operands spill.
        return (32, 16), (32, 16)
    sizes = (128, 64, 32, 16)
    return sizes[1:] if projection == "gate_up" and few else sizes, sizes if few else sizes[1:]


def _depths(shape: MoeShape, projection: Projection, wanted: tuple[int, ...]) -> tuple[int, ...]:
    if shape.weights == "int4":
        return (shape.group_size,)
    depth = shape.hidden_size if projection == "gate_up" else shape.intermediate_size
    return tuple(block for block in wanted if block <= max(16, _power_of_two(depth)))


def _gemv_tile(shape: MoeShape, projection: Projection) -> Tile:
    depth = shape.hidden_size if projection == "gate_up" else shape.intermediate_size
    if shape.weights == "int4":
        # Whole groups, as many as fill a step: a program of few steps needs many bytes in flight.
        even = next((block for block in (1024, 512, 256, 128) if block % shape.group_size == 0 == depth % block), 0)
        return Tile(16, even or shape.group_size, 1, 4, 1)
    # Steps that divide the depth need no masks.
    even = next((block for block in (512, 256, 128) if depth % block == 0), min(512, _power_of_two(depth)))
    return Tile(16, even, 1, 4, 1)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def fits(tile: Tile, block_m: int, projection: Projection, shape: MoeShape, device: Device) -> bool:
    """Return True if a tile of the `tiled` and `persistent` variants can run on the device without planned spilling."""
    matrices = 2 if projection == "gate_up" else 1
    in_registers = matrices * block_m * tile.block_n // (32 * tile.num_warps)
    limit = _MAX_ACCUMULATORS_PER_THREAD
    if shape.weights == "int4":
        # The product of a group is held beside the accumulator until it is scaled, and each scale needs a pointer: two
        # registers for each of the quarter of the columns that a thread has.
        in_registers = 2 * in_registers + matrices * tile.block_n // 2
        limit += _SCALE_POINTERS_PER_THREAD
    # One int4 group per step: its scale belongs to the product of that step.
    whole_group = shape.weights != "int4" or tile.block_k == shape.group_size
    return (
        whole_group
        and shared_bytes(tile, block_m, projection, shape.weights) <= device.shared_bytes
        and in_registers <= limit
    )


def shared_bytes(tile: Tile, block_m: int, projection: Projection, weights: WeightFormat) -> int:
    """Return the bytes of shared memory of the steps in flight: both operands, the weights twice for gate and up.

    Activations count as wide as unquantised weights. Quantised weights are widened in registers on their way to the
    dot, through one more buffer of the wide type.
    """
    wide = 4 if weights == "float32" else 2
    matrices = 2 if projection == "gate_up" else 1
    stages = max(tile.num_stages, 1)
    stored = matrices * tile.block_n * tile.block_k
    widened = 0 if WEIGHT_BITS[weights] >= 16 else stored * wide
    return stages * (block_m * tile.block_k * wide + stored * WEIGHT_BITS[weights] // 8) + widened


def programs_that_fit(tile: Tile, block_m: int, projection: Projection, shape: MoeShape, device: Device) -> int:
    """Return the number of `tiled` or `persistent` programs that fit a multiprocessor's shared memory at once.

    With up to 32 rows, which the tensor cores take from registers, one step fewer is held than there are stages.
    """
    held = replace(tile, num_stages=max(1, tile.num_stages - 1)) if block_m <= 32 else tile
    return (device.shared_bytes + _RESERVED_BYTES) // (
        shared_bytes(held, block_m, projection, shape.weights) + _RESERVED_BYTES
    )


def candidate_variants(shape: MoeShape, num_tokens: int, device: Device) -> list[Variant]:
    """Return the variants worth timing for a number of tokens."""
    variants: list[Variant] = ["tiled"]
    if num_tokens <= 8:
        variants = ["gemv_split", "gemv", "tiled"]
    if num_tokens >= 256 and allows_persistent(shape, device):
        variants.append("persistent")
    return variants


def candidate_block_ms(shape: MoeShape, num_tokens: int) -> list[int]:
    """Return the row tiles worth timing: the heuristic's and its neighbours."""
    own = block_m_of(shape.rows_per_expert(num_tokens))
    return [block for block in (16, 32, 64, 128) if own // 2 <= block <= own * 2]


def candidate_tiles(
    shape: MoeShape, num_tokens: int, projection: Projection, variant: Variant, block_m: int, device: Device
) -> list[Tile]:
    """Return at most `MAX_CANDIDATES` tiles worth timing for one projection, the heuristic's first if it has one."""
    if variant in ("gemv", "gemv_split"):
        own = _gemv_tile(shape, projection)
        depths = tuple(depth for depth in (own.block_k, own.block_k // 2) if depth % max(16, shape.group_size) == 0)
        tiles = [
            Tile(block_n, block_k, 1, num_warps, 1)
            for block_n, block_k, num_warps in itertools.product((4, 8, 16, 32), depths, (2, 4, 8))
        ]
        return _own_first(own, tiles)
    few = block_m <= 32
    depths = _depths(shape, projection, (64, 128, 256) if few else (64, 128))
    widths = (32, 64, 128) if projection == "gate_up" else (64, 128, 256)
    tiles = [
        Tile(block_n, block_k, group_m, num_warps, num_stages)
        for block_n, block_k, num_stages, num_warps, group_m in itertools.product(
            widths, depths, (2, 3, 4, 5), (4, 8), (1, 4) if few else (1, 8)
        )
        if (num_warps == 8) == (block_m * block_n >= 64 * 128)
    ]
    own_tile = _first_that_fits(block_m, projection, shape, device)
    tiles = [tile for tile in tiles if fits(tile, block_m, projection, shape, device)]
    return tiles[:MAX_CANDIDATES] if own_tile is None else _own_first(own_tile, tiles)


def _own_first(own: Tile, tiles: list[Tile]) -> list[Tile]:
    """Order tiles by their distance to the heuristic's, so that the limit drops the farthest."""

    def distance(tile: Tile) -> float:
        width, depth = math.log2(tile.block_n / own.block_n), math.log2(tile.block_k / own.block_k)
        return abs(width) + abs(depth) + abs(tile.num_stages - own.num_stages) / 2 + (tile.group_m != own.group_m) / 4

    return [own, *sorted((tile for tile in tiles if tile != own), key=distance)][:MAX_CANDIDATES]


def write_tuned(
    path: Path,
    shape: MoeShape,
    platform: Platform,
    configs: Mapping[int, MoeConfig],
    microseconds: Mapping[int, float],
) -> None:
    """Write the fastest configuration and its time per number of tokens. Raises OSError."""
    entries = {
        str(tokens): {"microseconds": round(microseconds[tokens], 1), **config.to_dict()}
        for tokens, config in sorted(configs.items())
    }
    write_entries(path, shape, platform, entries)


def read_tuned(path: Path, shape: MoeShape, platform: Platform, device: Device) -> dict[int, MoeConfig]:
    """Read configurations by number of tokens, at least one. Raises TuningError for a broken file or another key."""
    configs = read_entries(path, shape, platform, lambda tokens, config: (int(tokens), MoeConfig.from_dict(config)))
    if not configs or not all(_runs(config, shape, device) for config in configs.values()):
        raise TuningError(f"{path} has configurations that cannot run here")
    return configs


def _runs(config: MoeConfig, shape: MoeShape, device: Device) -> bool:
    tiles = (config.gate_up, config.down)
    if any(not _is_power_of_two(size) for tile in tiles for size in (tile.block_n, tile.block_k, tile.num_warps)):
        return False
    if config.variant in ("gemv", "gemv_split"):
        return shape.weights != "int4" or all(tile.block_k == shape.group_size for tile in tiles)
    if config.variant == "persistent" and not allows_persistent(shape, device):
        return False
    return (
        config.block_m in (16, 32, 64, 128)
        and fits(config.gate_up, config.block_m, "gate_up", shape, device)
        and fits(config.down, config.block_m, "down", shape, device)
    )


def _is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


class Named(Protocol):
    """A shape that kernels are tuned for."""

    def name(self) -> str: ...


def file_name(shape: Named, platform: Platform) -> str:
    gpu = re.sub(r"[^a-z0-9]+", "-", platform.gpu.lower()).strip("-")
    return f"{shape.name()}--{gpu}--triton-{_minor(platform.triton)}.json"


def first_file(
    folders: Sequence[Path], shape: Named, platform: Platform, read: Callable[[Path], Config]
) -> Config | None:
    """Read the first of the folders' files that `read` does not refuse; log its name, or that there is none."""
    for folder in folders:
        path = folder / file_name(shape, platform)
        if not path.exists():
            continue
        try:
            tuned = read(path)
        except TuningError as error:
            _log.warning("%s; looking further", error)
            continue
        _log.info("%s runs with the tuned configurations of %s", shape.name(), path)
        return tuned
    _log.warning(
        "%s runs with untuned configurations on %s with Triton %s: `moeserve tune` measures better ones",
        shape.name(),
        platform.gpu,
        platform.triton,
    )
    return None


def read_entries(
    path: Path, shape: Named, platform: Platform, parse: Callable[[str, dict[str, Any]], tuple[Key, Config]]
) -> dict[Key, Config]:
    """Parse each entry's name and fields except the time. Raises TuningError as `read_tuned` does."""
    try:
        fields = json.loads(path.read_text())
        found = (fields["format"], fields["shape"], fields["gpu"], _minor(fields["triton"]))
        configs = dict(
            parse(name, {field: value for field, value in entry.items() if field != "microseconds"})
            for name, entry in fields["configs"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"{path} is no file of tuned configurations ({error!r})") from error
    wanted = (_FORMAT, shape.name(), platform.gpu, _minor(platform.triton))
    if found != wanted:
        raise TuningError(f"{path} is for {found}, not for {wanted}")
    return configs


def write_entries(path: Path, shape: Named, platform: Platform, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a tuned file. Raises OSError."""
    fields = {
        "format": _FORMAT,
        "shape": shape.name(),
        "gpu": platform.gpu,
        "triton": platform.triton,
        "configs": configs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n")


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
