"""`python -m benchmarks.tiles`: prompts and streams with the kernels of a processor, beside what bounds them.

Made for a processor with tiles (AMX), and runs on any. It prints, as tables of Markdown: products of every format and
attention, with their share of the tiles' rate; then, over HTTP, cold prompts and streams of the demo and of four layers
of Qwen3-30B-A3B's shape, form after form in turns, medians of as many rounds as the time allows. Servers of others that
are named with `--peer` take part in the turns.
"""

from __future__ import annotations

import json
import platform
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from os import getloadavg
from pathlib import Path
from random import Random
from shutil import copy
from statistics import median
from tempfile import TemporaryDirectory

import click
import httpx2
import torch

from benchmarks.kv_restart import serving
from benchmarks.large_gguf import write_model
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.library import kernels_in_use, native_kernels
from kernels.weight_formats import FORMATS, FP8_FORMATS
from moeserve.bench.decode import SHAPES, TileRates, best_seconds, measure, read_bandwidth, read_tile_rates, shape_of
from moeserve.model.demo import ensure_demo
from moeserve.model.families import build_spec, load_config
from moeserve.model.sizes import count_parameters, write_dummy
from moeserve.model.spec import AttentionSpec

_LAYERS = 4  # of Qwen3-30B-A3B's shape
_KEYS = 8000  # before the last of the rows whose attention is timed
_ROWS = 256
_BLOCK = 16
_VOCAB = (200, 40_000)  # random tokens of prompts, which every model here has
_WARM_UP = 300  # tokens of each server's first prompt
_QUIET = ("--speculative-config", "none", "--slo", "ttft:600s", "--served-model-name", "m", "--kv-disk-path", "none")
_ROOM = ("--kv-cache-memory", "2GiB", "--max-num-seqs", "64")


@dataclass(frozen=True, slots=True)
class Size:
    """The measurements of one run. minutes: no measurement begins later than this after the start."""

    prompts: tuple[int, ...] = (960, 3660, 18_000)
    streams: tuple[int, ...] = (1, 16, 64)
    tokens: int = 64
    rounds: int = 3
    minutes: float = 28.0


SHORT = Size(prompts=(300, 960), streams=(1, 4), tokens=16, rounds=1, minutes=5.0)


@dataclass(slots=True)
class Server:
    """A server of one form of a model. found: the figures of each measure, in the order of rounds."""

    name: str
    http: httpx2.Client
    model: str = "m"
    found: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, prompt: list[int], max_tokens: int) -> int:
        """Return the number of tokens of the answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        response = self.http.post("/v1/completions", json=body)
        if response.status_code != 200:
            raise click.ClickException(f"{self.name}: {response.status_code}: {response.text}")
        return int(response.json()["usage"]["completion_tokens"])


class Clock:
    """The time that is left. A measure that took longer before than is left now is not begun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._took: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], float]) -> float | None:
        """Return the figure of `work`, None where the time does not suffice."""
        began = time.monotonic()
        if began + self._took.get(name, 0.0) > self._end:
            return None
        figure = work()
        self._took[name] = max(self._took.get(name, 0.0), time.monotonic() - began)
        return figure


def prompt_of(draw: Random, count: int) -> list[int]:
    return [draw.randrange(*_VOCAB) for _ in range(count)]


def seconds_of_prompt(server: Server, draw: Random, count: int) -> float:
    """Return the seconds to the first token of a prompt that nothing has seen."""
    prompt = prompt_of(draw, count)
    began = time.perf_counter()
    server.ask(prompt, 1)
    return time.perf_counter() - began


def rate_of_streams(server: Server, draw: Random, count: int, tokens: int) -> float:
    """Return the tokens per second of streams that begin together."""
    prompts = [prompt_of(draw, 16) for _ in range(count)]
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        total = sum(pool.map(lambda prompt: server.ask(prompt, tokens), prompts))
    return total / (time.perf_counter() - began)


def measure_in_turns(servers: Sequence[Server], size: Size, clock: Clock) -> None:
    draw = Random(time.time_ns())
    for server in servers:
        server.ask(prompt_of(draw, _WARM_UP), 4)
    works: list[tuple[str, Callable[[Server], float]]] = [
        (f"{count:,} tokens", partial(seconds_of_prompt, draw=draw, count=count)) for count in size.prompts
    ]
    works += [
        (f"{count} streams", partial(rate_of_streams, draw=draw, count=count, tokens=size.tokens))
        for count in size.streams
    ]
    for _ in range(size.rounds):
        for name, work in works:
            for server in servers:
                figure = clock.run(f"{server.name} {name}", partial(work, server))
                if figure is not None:
                    server.found.setdefault(name, []).append(figure)


def qwen3_folder(folder: Path, demo: Path) -> Path:
    """Make a folder of layers of Qwen3-30B-A3B's shape, with drawn weights in bfloat16, and the demo's tokens."""
    shape = SHAPES["qwen3-30b-a3b"]
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": json.loads((demo / "config.json").read_text())["vocab_size"],
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.width,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": shape.q_size // 128,
        "num_key_value_heads": shape.kv_size // 128,
        "head_dim": 128,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(demo / name, folder)
    write_dummy(folder)
    return folder


def operations_of(folder: Path, tokens: int) -> float:
    """Return the multiplications and additions of a prompt: of weights that compute a token, and of attention."""
    spec = build_spec(load_config(folder))
    assert isinstance(spec.attention, AttentionSpec)
    active = count_parameters(spec).active or 0
    attention = spec.num_layers * spec.attention.num_heads * spec.attention.head_dim * 2 * tokens**2
    return 2.0 * active * tokens + attention


def kernel_lines(tiles: TileRates | None, size: Size) -> Iterator[str]:
    """Yield the table of products and attention: billions of operations per second, and shares of the tiles' rate."""
    yield "| kernel | rows | GOP/s | of the tiles |\n|---|---|---|---|"
    names = ("bfloat16", "q8_0", "q4_k") if size is SHORT else ("bfloat16", *FORMATS)
    for shape_name in ("demo",) if size is SHORT else ("demo", "qwen3-30b-a3b"):
        shape = SHAPES.get(shape_name) or shape_of(shape_name)[0]
        for name in names:
            narrow = name == "bfloat16" or FORMATS[name] in FP8_FORMATS
            for figure in measure(shape, 1, (name,), "int8", narrow_rows=narrow):
                rate = figure.operations_per_second
                bound = None if tiles is None else tiles.bound(name, figure.num_rows, "int8", narrow_rows=narrow)
                yield _row(f"{shape_name}, {name}", figure.num_rows, f"{rate / 1e9:.0f}", _share(rate, bound))
    for heads, kv_heads, dim in ((9, 3, 64), (32, 4, 128)):
        for dtype in (torch.bfloat16, torch.int8):
            rate = attention_rate(heads, kv_heads, dim, dtype)
            bound = None
            if tiles is not None:
                bound = tiles.of_pairs if dtype is torch.bfloat16 else tiles.of_bytes
            name = f"attention {heads}/{kv_heads} of {dim}, {str(dtype).removeprefix('torch.')}"
            yield _row(name, _ROWS, f"{rate / 1e9:.0f}", _share(rate, bound))


@torch.inference_mode()
def attention_rate(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> float:
    """Return the operations per second of a prompt's last rows over its keys and values."""
    width = dim if dtype is torch.bfloat16 else dim + 4
    keys, values = (torch.randn(kv_heads, _KEYS, width).to(dtype) for _ in range(2))
    plan = AttentionPlan([ChunkSpan(_ROWS, _KEYS - _ROWS, array("i", range(_KEYS // _BLOCK)))], _BLOCK)
    q = torch.randn(_ROWS, heads, dim)
    seconds = best_seconds(lambda: paged_attention(q, keys, values, plan, scale=dim**-0.5))
    return 4.0 * _ROWS * heads * dim * (_KEYS - _ROWS / 2) / seconds


def service_lines(title: str, folder: Path, servers: Sequence[Server], tiles: TileRates | None) -> Iterator[str]:
    """Yield the table of a model's servers: medians, and for prompts the share of the tiles' rate for bfloat16."""
    names = list(dict.fromkeys(name for server in servers for name in server.found))
    yield _row(title, *(server.name for server in servers))
    yield _row(*["---"] * (len(servers) + 1))
    for name in names:
        cells = []
        for server in servers:
            figures = server.found.get(name)
            cell = "" if figures is None else f"{median(figures):.3g} ({len(figures)})"
            if figures and name.endswith("tokens") and tiles is not None:
                operations = operations_of(folder, int(name.split()[0].replace(",", "")))
                cell += _share(operations / median(figures), tiles.of_pairs).rjust(5)
            cells.append(cell)
        yield _row(f"{name}, {'s' if name.endswith('tokens') else 'tokens/s'}", *cells)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _share(rate: float, bound: float | None) -> str:
    return "" if bound is None else f"{rate / bound:.0%}"


@click.command()
@click.option("--short", is_flag=True, help="A few minutes, to see that it works.")
@click.option("--only", type=click.Choice(("kernels", "demo", "qwen3")), multiple=True)
@click.option("--peer", "peers", multiple=True, metavar="MODEL:NAME=URL", help="demo or qwen3, and its server.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File that the tables are added to.")
def command(*, short: bool, only: tuple[str, ...], peers: tuple[str, ...], out: Path | None) -> None:
    """Measure what this processor's kernels give, within half an hour."""
    size = SHORT if short else Size()
    clock, began = Clock(60 * size.minutes), time.monotonic()
    if (kernels := native_kernels()) is None:
        raise click.ClickException("There are no compiled kernels on this machine.")

    def say(line: str) -> None:
        click.echo(line)
        if out is not None:
            with out.open("a") as file:
                file.write(line + "\n")

    tiles = read_tile_rates(kernels)
    say(f"{platform.node()}, {kernels_in_use()}, {torch.get_num_threads()} threads, load {getloadavg()[0]:.1f}")
    say(f"memory is read at {read_bandwidth() / 1e9:.1f} GB/s")
    if tiles is not None:
        say(f"tiles: {tiles.of_pairs / 1e9:.0f} GOP/s in bfloat16, {tiles.of_bytes / 1e9:.0f} in groups of bytes")
    if not only or "kernels" in only:
        for line in kernel_lines(tiles, size):
            say(line)
    demo = ensure_demo()
    with TemporaryDirectory() as name:
        folder = Path(name)
        for model in ("demo", "qwen3"):
            if only and model not in only:
                continue
            weights, forms = (demo, DEMO_FORMS) if model == "demo" else qwen3_forms(folder, demo, size)
            for line in service_tables(model, weights, forms, peers, folder, size, clock, tiles):
                say(line)
    say(f"took {(time.monotonic() - began) / 60:.0f} minutes")


# By name: the settings of `moeserve serve`.
Forms = dict[str, tuple[str, ...]]
DEMO_FORMS: Forms = {
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
    "float32": ("--dtype", "float32"),
}


def qwen3_forms(folder: Path, demo: Path, size: Size) -> tuple[Path, Forms]:
    """Return a folder of the model, and its forms: its file in Q4_K, and but for a short run the folder in bfloat16."""
    file, drawn = folder / "qwen3.gguf", qwen3_folder(folder / "qwen3", demo)
    write_model(file, 1 if size is SHORT else _LAYERS)
    if size is SHORT:
        return drawn, {"Q4_K": (str(file),)}
    return drawn, {"bfloat16": (str(drawn), "--dtype", "bfloat16"), "Q4_K": (str(file),)}


def service_tables(
    model: str,
    weights: Path,
    forms: Forms,
    peers: Sequence[str],
    folder: Path,
    size: Size,
    clock: Clock,
    tiles: TileRates | None,
) -> Iterator[str]:
    with ExitStack() as ends:
        servers = [
            Server(name, ends.enter_context(serving(folder, [*settings, *_QUIET, *_ROOM], on_disk=False)))
            for name, settings in forms.items()
        ]
        for peer in peers:
            of_model, _, named = peer.partition(":")
            name, _, address = named.partition("=")
            if of_model == model:
                http = ends.enter_context(httpx2.Client(base_url=address, timeout=600.0))
                listed = http.get("/v1/models").json()["data"][0]["id"]
                servers.append(Server(name, http, listed))
        measure_in_turns(servers, size, clock)
        yield from service_lines(model, weights, servers, tiles)


if __name__ == "__main__":
    command()
