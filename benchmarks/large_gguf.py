"""`python -m benchmarks.large_gguf`: a random model of Qwen3-30B-A3B's shape in Q4_K, its start, memory and streams.

`write FILE` streams the file to disk, 17 GB with all 48 layers. `serve MODEL` starts a service of it, or of any other
model, and prints the seconds until it is ready, the most memory of its processes together, and the tokens per second of
several streams. With `--store DIR` it also waits until the expert file is written there, which the next start reads.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, product
from math import prod
from os import getloadavg
from pathlib import Path
from random import Random
from socket import socket
from threading import Event, Thread

import click
import gguf
import httpx2
import numpy as np
import torch
from tokenizers import pre_tokenizers

from benchmarks.kv_restart import wait_until_ready
from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import quantise
from kernels.weight_formats import Q4_K, Q6_K, WeightFormat
from moeserve.bench.decode import SHAPES

_SHAPE = SHAPES["qwen3-30b-a3b"]
_HEAD_DIM = 128
_POOL_ROWS = 2048  # Rows of each depth that are quantised; matrices are made of them in random order.
_PROMPT_VOCAB = 10_000  # Prompts are of tokens below it, which other models have, too.
_POLL_S = 0.5
_NAME = "large"
_KINDS = {Q4_K: gguf.GGMLQuantizationType.Q4_K, Q6_K: gguf.GGMLQuantizationType.Q6_K}
Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix [rows, depth], or as many of them as there are experts."""

    name: str
    form: WeightFormat
    rows: int
    depth: int
    experts: int = 1


def _matrices(layers: int) -> Iterator[_Matrix]:
    shape = _SHAPE
    yield _Matrix("token_embd", Q4_K, shape.vocab, shape.hidden)
    yield _Matrix("output", Q6_K, shape.vocab, shape.hidden)
    for layer in range(layers):
        yield _Matrix(f"blk.{layer}.attn_q", Q4_K, shape.q_size, shape.hidden)
        yield _Matrix(f"blk.{layer}.attn_k", Q4_K, shape.kv_size, shape.hidden)
        yield _Matrix(f"blk.{layer}.attn_v", Q4_K, shape.kv_size, shape.hidden)
        yield _Matrix(f"blk.{layer}.attn_output", Q4_K, shape.hidden, shape.q_size)
        for part in ("gate", "up"):
            yield _Matrix(f"blk.{layer}.ffn_{part}_exps", Q4_K, shape.width, shape.hidden, shape.num_experts)
        yield _Matrix(f"blk.{layer}.ffn_down_exps", Q4_K, shape.hidden, shape.width, shape.num_experts)


def _vectors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "output_norm", (_SHAPE.hidden,)
    for layer in range(layers):
        for name in ("attn", "ffn"):
            yield f"blk.{layer}.{name}_norm", (_SHAPE.hidden,)
        for name in ("attn_q", "attn_k"):
            yield f"blk.{layer}.{name}_norm", (_HEAD_DIM,)
        yield f"blk.{layer}.ffn_gate_inp", (_SHAPE.num_experts, _SHAPE.hidden)


class _Rows:
    """Random quantised rows, each of unit length."""

    def __init__(self) -> None:
        self._pools: dict[tuple[WeightFormat, int], Array] = {}
        self._draw = np.random.default_rng(0)

    def of(self, matrix: _Matrix) -> Array:
        key = matrix.form, matrix.depth
        if key not in self._pools:
            kernels = native_kernels()
            if kernels is None:
                raise click.ClickException("There are no compiled kernels on this machine.")
            numbers = torch.randn(_POOL_ROWS, matrix.depth).div_(matrix.depth**0.5)
            self._pools[key] = quantise(numbers, matrix.form, kernels).data.numpy()
        rows = self._pools[key].take(self._draw.integers(_POOL_ROWS, size=matrix.rows * matrix.experts), 0)
        return rows.reshape(matrix.experts, matrix.rows, -1) if matrix.experts > 1 else rows


def write_model(path: Path, layers: int) -> None:
    """Write the file, one tensor in memory at a time."""
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _write_fields(writer, layers)
    for matrix in _matrices(layers):
        row = matrix.rows, matrix.form.row_bytes(matrix.depth)
        _announce(writer, matrix.name, row if matrix.experts == 1 else (matrix.experts, *row), _KINDS[matrix.form])
    for name, size in _vectors(layers):
        _announce(writer, name, size, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rows = _Rows()
    for matrix in _matrices(layers):
        writer.write_tensor_data(rows.of(matrix))
    for _, size in _vectors(layers):
        gate = torch.randn(size).div_(_SHAPE.hidden**0.5) if len(size) > 1 else torch.ones(size)
        writer.write_tensor_data(gate.numpy())
    writer.close()


def _announce(
    writer: gguf.GGUFWriter, name: str, size: tuple[int, ...], kind: gguf.GGMLQuantizationType | None
) -> None:
    """size: in bytes of a quantised kind, in float32 numbers without one."""
    dtype = np.dtype(np.float32 if kind is None else np.uint8)
    writer.add_tensor_info(f"{name}.weight", size, dtype, prod(size) * dtype.itemsize, raw_dtype=kind)


def _write_fields(writer: gguf.GGUFWriter, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(40960)
    writer.add_embedding_length(_SHAPE.hidden)
    writer.add_feed_forward_length(3 * _SHAPE.hidden)
    writer.add_head_count(_SHAPE.q_size // _HEAD_DIM)
    writer.add_head_count_kv(_SHAPE.kv_size // _HEAD_DIM)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(_SHAPE.num_experts)
    writer.add_expert_used_count(_SHAPE.top_k)
    writer.add_expert_feed_forward_length(_SHAPE.width)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ("".join(letters) for size in (1, 2, 3) for letters in product(alphabet, repeat=size))
    tokens = list(islice(chain(("<|end|>", "<|start|>"), texts), _SHAPE.vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)


@dataclass(slots=True)
class _Memory:
    """The most memory that a process and its descendants held together, in bytes: shares of pages, files' included."""

    peak: int = 0
    peak_anonymous: int = 0
    done: Event = field(default_factory=Event)

    def watch(self, pid: int) -> None:
        while not self.done.wait(_POLL_S):
            total = anonymous = 0
            for number in _family(pid):
                try:
                    lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
                except OSError:  # It has ended.
                    continue
                sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
                total += sizes["Pss"]
                anonymous += sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
            self.peak, self.peak_anonymous = max(self.peak, total), max(self.peak_anonymous, anonymous)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += (member for child in children.read_text().split() for member in _family(int(child)))
    except OSError:  # It has ended.
        pass
    return found


@contextmanager
def serving(path: Path, settings: Sequence[str], memory: _Memory) -> Iterator[httpx2.Client]:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Streams that would wait for long are not refused: all of them are timed.
    command = [sys.executable, "-m", "launcher.cli", "serve", str(path), "--port", str(port), "--slo", "ttft:600s"]
    command += ["--served-model-name", _NAME, *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        watcher = Thread(target=memory.watch, args=(process.pid,))
        watcher.start()
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as http:
                wait_until_ready(http, process)
                yield http
        finally:
            memory.done.set()
            watcher.join()
            process.terminate()


def _answer(http: httpx2.Client, prompt: list[int], tokens: int) -> int:
    body = {"model": _NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    response = http.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise click.ClickException(f"{response.status_code}: {response.text}")
    count: int = response.json()["usage"]["completion_tokens"]
    return count


def _tokens_per_second(http: httpx2.Client, streams: int, tokens: int, draw: Random) -> float:
    prompts = [[draw.randrange(2, _PROMPT_VOCAB) for _ in range(16)] for _ in range(streams)]
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        count = sum(pool.map(lambda prompt: _answer(http, prompt, tokens), prompts))
    return count / (time.perf_counter() - began)


@click.group()
def command() -> None:
    """A large random model in a GGUF file."""


@command.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--layers", type=click.IntRange(1, 48), default=48, show_default=True)
def write(path: Path, layers: int) -> None:
    """Write the file."""
    began = time.perf_counter()
    write_model(path, layers)
    click.echo(f"{path.stat().st_size / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s")


@command.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True), metavar="MODEL")
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each stream.")
@click.option("--store", type=click.Path(path_type=Path), help="For --expert-store-dir; its file is waited for.")
@click.argument("settings", nargs=-1)
def serve(path: Path, streams: int, tokens: int, store: Path | None, settings: tuple[str, ...]) -> None:
    """Serve the model and print what it takes. SETTINGS, after --, are further settings of `moeserve serve`."""
    if store is not None:
        settings = (*settings, "--expert-store-dir", str(store))
    memory, draw, began = _Memory(), Random(0), time.perf_counter()
    with serving(path, settings, memory) as http:
        ready_s = time.perf_counter() - began
        click.echo(f"ready after {ready_s:.1f} s, at a load of {getloadavg()[0]:.1f}")
        one = _tokens_per_second(http, 1, tokens, draw)
        many = _tokens_per_second(http, streams, tokens, draw)
        while store is not None and not list(store.glob("*/experts.bin")):
            time.sleep(_POLL_S)
        if store is not None:
            click.echo(f"expert file there after {time.perf_counter() - began:.0f} s")
    stored = sum(file.stat().st_size for file in [path, *path.rglob("*")]) / 2**30
    gib, anonymous = memory.peak / 2**30, memory.peak_anonymous / 2**30
    click.echo(f"model {stored:.2f} GiB, most memory {gib:.2f} GiB, {anonymous:.2f} of it not in files")
    click.echo(f"one stream {one:.1f} tokens/s, {streams} streams {many:.1f} tokens/s")


if __name__ == "__main__":
    command()
