"""`moeserve bench decode`: the products of a model's step on this CPU, with random weights, beside their bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.cpu.packing import WeightMemory
from kernels.linear import Linear
from kernels.moe import expert_layout
from kernels.ops import CpuOps
from kernels.packed_experts import ExpertShape, PackedExperts
from kernels.weight_formats import FORMATS, FP8_FORMATS, Arithmetic, Matrix, QuantizedRows, WeightFormat
from moeserve.model.checkpoint import read_index
from moeserve.model.families import build_spec, load_config
from moeserve.model.rounding import fine, format_in_file
from moeserve.model.source import resolve_model
from moeserve.model.spec import AttentionSpec, ModelError

ROWS = (1, 4, 16, 256)
_READ_BYTES = 2**30  # memory whose reading is timed
_BEST_OF = 5  # the shortest of this number of times counts
_TILE_BATCHES = 4096  # of 64 products of tiles, whose time tells how fast they are
_TILE_OPERATIONS = 64 * 2 * 16 * 16 * 32
_ROWS_IN_TILES = 16  # the fewest that rows of bytes fill
_CACHED = 1024  # rows and depth of the matrix that tells how fast products are beside the caches


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model: attention's query and KV channels, experts of a layer and experts of a token."""

    hidden: int
    q_size: int
    kv_size: int
    num_experts: int
    top_k: int
    width: int
    vocab: int
    layers: int


SHAPES = {
    "olmoe": Shape(2048, 2048, 2048, 64, 8, 1024, 50304, 16),
    "qwen3-30b-a3b": Shape(2048, 4096, 512, 128, 8, 768, 151936, 48),
    "gpt-oss-20b": Shape(2880, 4096, 512, 32, 4, 2880, 201088, 24),
}


def shape_of(model: str) -> tuple[Shape, tuple[str, ...]]:
    """Return the sizes of a model, a folder, GGUF file or hub id, and the formats of its quantised matrices, if any.

    Raise ModelError, also for a model of another kind than this command times.
    """
    folder = Path(resolve_model(model, revision=None, offline=False, progress=lambda *_: None))
    spec, index = build_spec(load_config(folder)), read_index(folder)
    moe, attention = spec.moe, spec.attention
    if moe is None or not isinstance(attention, AttentionSpec):
        raise ModelError(f"{model} lacks experts, or attention whose heads have keys of their own.")
    channels = attention.head_dim
    sizes = channels * attention.num_heads, channels * attention.num_kv_heads, moe.num_experts, moe.gate.top_k
    stored = {form.name for info in index.values() if (form := format_in_file(info.dtype)) is not None}
    shape = Shape(spec.hidden_size, *sizes, moe.intermediate_size, spec.vocab_size, spec.num_layers)
    return shape, tuple(sorted(stored))


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    out: Linear
    experts: PackedExperts


class Products:
    """The products of all layers and the head; norms, attention and gates are left out."""

    def __init__(
        self, shape: Shape, layers: int, form: WeightFormat | None, arithmetic: Arithmetic, *, narrow_rows: bool = False
    ) -> None:
        """form: of all weights, None for bfloat16. narrow_rows: see `kernels.linear.pack_linear`.

        Raise ValueError where rows are not whole blocks of `form`.
        """
        self._shape, self._form, self._ops = shape, form, CpuOps(arithmetic, narrow_rows=narrow_rows)
        formats = None if form is None else (form, form)
        kept = torch.bfloat16 if form is None else torch.float32
        self._expert = ExpertShape(
            shape.hidden,
            shape.width,
            torch.float32,
            kept,
            formats=formats,
            arithmetic=arithmetic,
            narrow_rows=narrow_rows,
        )
        self._layers = [self._layer() for _ in range(layers)]
        self._head = self._linear(shape.vocab, shape.hidden, "lm_head")

    def _matrix(self, rows: int, depth: int) -> Matrix:
        if self._form is None:
            return torch.randn(rows, depth).div_(depth**0.5).bfloat16()
        data = torch.randint(0, 32, (rows, self._form.row_bytes(depth)), dtype=torch.uint8)
        return QuantizedRows(self._form, data, depth)

    def _linear(self, rows: int, depth: int, key: str) -> Linear:
        return self._ops.pack_linear(fine(self._matrix(rows, depth), key), None, torch.float32)

    def _layer(self) -> _Layer:
        shape = self._shape
        # All experts have the same numbers, each in memory of its own.
        matrices = self._matrix(2 * shape.width, shape.hidden), self._matrix(shape.hidden, shape.width), None, None
        return _Layer(
            self._linear(shape.q_size + 2 * shape.kv_size, shape.hidden, "q"),
            self._linear(shape.hidden, shape.q_size, "o"),
            self._ops.pack_experts(self._expert, shape.num_experts, lambda _: matrices),
        )

    @torch.inference_mode()
    def step(self, x: Tensor, choices: Tensor, weights: Tensor) -> None:
        """x [T, hidden], choices [layers, T, k], weights [T, k]. The head computes at most 16 rows, as in prompts."""
        for layer, ids in zip(self._layers, choices, strict=True):
            layer.out(layer.qkv(x)[:, : self._shape.q_size])
            layer.experts(x, ids, weights, Activation())
        self._head(x[:16])

    def cached_rate(self) -> float:
        """Return the operations per second of products with one matrix of the format that stays in the caches."""
        linear, x = self._linear(_CACHED, _CACHED, "o"), torch.randn(ROWS[-1], _CACHED)
        return 2 * ROWS[-1] * _CACHED**2 / best_seconds(partial(linear, x))

    def bytes_and_operations(self, choices: Tensor) -> tuple[int, int]:
        """Return the bytes of weights that a step reads, and its multiplications and additions."""
        shape, num_rows = self._shape, choices.shape[1]
        dense = sum(layer.qkv.num_bytes + layer.out.num_bytes for layer in self._layers) + self._head.num_bytes
        chosen = sum(len(ids.unique()) for ids in choices)
        weights = (
            2
            * len(self._layers)
            * (shape.hidden * (shape.q_size * 2 + 2 * shape.kv_size) + shape.top_k * 3 * shape.hidden * shape.width)
        )
        operations = num_rows * weights + 2 * min(num_rows, 16) * shape.hidden * shape.vocab
        return dense + chosen * expert_layout(self._expert).num_bytes, operations


def best_seconds(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_BEST_OF):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def read_bandwidth() -> float:
    """Return the bytes per second that all threads read from memory in huge pages."""
    memory = WeightMemory().take(_READ_BYTES).zero_().view(torch.float32)
    return _READ_BYTES / best_seconds(memory.sum)


@dataclass(frozen=True, slots=True)
class TileRates:
    """The operations per second of products of tiles in registers: of pairs of bfloat16, and of groups of 32 bytes."""

    of_pairs: float
    of_bytes: float

    def bound(self, name: str, num_rows: int, arithmetic: Arithmetic, *, narrow_rows: bool) -> float | None:
        """Return the rate that bounds products with weights of a format; None where they take no tiles."""
        if name == "bfloat16" or FORMATS[name] in FP8_FORMATS:
            return self.of_pairs if narrow_rows else None
        return self.of_bytes if arithmetic == "int8" and num_rows >= _ROWS_IN_TILES else None


def read_tile_rates(kernels: NativeKernels) -> TileRates | None:
    """Time tiles on all threads; None where the machine has none."""
    if not kernels.has_tiles:
        return None
    of_bytes, of_pairs = (
        _TILE_BATCHES * _TILE_OPERATIONS / best_seconds(partial(kernels.multiply_tiles, _TILE_BATCHES, int(is_pairs)))
        for is_pairs in (False, True)
    )
    return TileRates(of_pairs, of_bytes)


@dataclass(frozen=True, slots=True)
class Figure:
    """One step of `num_rows` rows: its bytes of weights and operations per second. cached_rate: see `Products`."""

    form: str
    num_rows: int
    seconds: float
    bytes_per_second: float
    operations_per_second: float
    cached_rate: float


def measure(
    shape: Shape, layers: int, names: tuple[str, ...], arithmetic: Arithmetic, *, narrow_rows: bool = False
) -> Iterator[Figure]:
    """Yield the figures of each format (`bfloat16` or a name of `FORMATS`) that the shape's rows fit."""
    generator = torch.Generator().manual_seed(0)
    for name in names:
        try:
            products = Products(shape, layers, FORMATS.get(name), arithmetic, narrow_rows=narrow_rows)
        except ValueError as error:
            click.echo(f"{name} is left out: {error}.", err=True)
            continue
        rate = products.cached_rate()
        for num_rows in ROWS:
            x = torch.randn((num_rows, shape.hidden), generator=generator)
            scores = torch.rand((layers, num_rows, shape.num_experts), generator=generator)
            choices, weights = scores.topk(shape.top_k).indices, torch.full((num_rows, shape.top_k), 1 / shape.top_k)
            seconds = best_seconds(partial(products.step, x, choices, weights))
            num_bytes, operations = products.bytes_and_operations(choices)
            yield Figure(name, num_rows, seconds, num_bytes / seconds, operations / seconds, rate)


@click.command(name="decode")
@click.option("--shape", "name", default="olmoe", show_default=True, help=f"{', '.join(SHAPES)}, or a model.")
@click.option("--layers", type=click.IntRange(min=1), default=2, show_default=True, help="Layers to make.")
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(("bfloat16", *FORMATS)), help="Format of weights."
)
@click.option("--arithmetic", type=click.Choice(("int8", "exact")), default="int8", show_default=True)
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Threads; all cores unless given.")
def command(
    name: str, layers: int, formats: tuple[str, ...], arithmetic: Arithmetic, dtype: str, threads: int | None
) -> None:
    """Time the products of a step with random weights of a shape, for each format and number of rows."""
    if (kernels := native_kernels()) is None:
        raise click.ClickException("There are no compiled kernels on this machine.")
    if threads is not None:
        torch.set_num_threads(threads)
    stored: tuple[str, ...] = ()
    if (shape := SHAPES.get(name)) is None:
        try:
            shape, stored = shape_of(name)
        except ModelError as error:
            raise click.ClickException(str(error)) from error
    bandwidth, tiles = read_bandwidth(), read_tile_rates(kernels)
    click.echo(f"{name}, {layers} layers and the head, {torch.get_num_threads()} threads, {arithmetic} arithmetic")
    click.echo(f"memory is read at {bandwidth / 1e9:.1f} GB/s\n")
    heads = ["weights", "rows", "ms", "rows/s", "GB/s", "of the memory", "GOP/s", "of the cached"]
    if tiles is not None:
        rates = f"{tiles.of_pairs / 1e9:.0f} GOP/s in bfloat16, {tiles.of_bytes / 1e9:.0f} in groups of bytes"
        click.echo(f"tiles by themselves: {rates}\n")
        heads.append("of the tiles")
    click.echo(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    names = formats or stored or ("bfloat16", "q8_0", "q4_0", "q4_k", "q6_k")
    narrow = dtype == "bfloat16"
    for figure in measure(shape, layers, names, arithmetic, narrow_rows=narrow):
        cells = [
            figure.form,
            str(figure.num_rows),
            f"{figure.seconds * 1e3:.2f}",
            f"{figure.num_rows / figure.seconds:.1f}",
            f"{figure.bytes_per_second / 1e9:.1f}",
            f"{figure.bytes_per_second / bandwidth:.0%}",
            f"{figure.operations_per_second / 1e9:.0f}",
            f"{figure.operations_per_second / figure.cached_rate:.0%}",
        ]
        if tiles is not None:
            bound = tiles.bound(figure.form, figure.num_rows, arithmetic, narrow_rows=narrow)
            cells.append("" if bound is None else f"{figure.operations_per_second / bound:.0%}")
        click.echo(f"| {' | '.join(cells)} |")
