"""Perplexity of the demo by position in texts longer than its 8,192 tokens, for ways to stretch its angles.

`python -m benchmarks.long_contexts` reads the beginning of this repository's documents, joined in the order of their
names, or of `--text FILE`. Every form computes the whole text with its own angles, as requests beyond the original
context do.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from moeserve.model.decoder import Decoder, ForwardBatch
from moeserve.model.demo import ensure_demo
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import KVPool
from moeserve.model.spec import RopeSpec
from moeserve.model.weights import load_decoder

_ROOT = Path(__file__).resolve().parent.parent
_BLOCK_SIZE, _CHUNK, _BUCKET = 16, 256, 4096
_ORIGINAL, _LONGEST = 8192, 32768


def _ntk(rope: RopeSpec, factor: float) -> RopeSpec:
    """Return the angles of a larger base, as of dynamic NTK scaling for a context of `factor` times the original."""
    return replace(rope, theta=rope.theta * factor ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(rope: RopeSpec, attention_factor: float | None) -> RopeSpec:
    factor = _LONGEST / _ORIGINAL
    return replace(rope, kind="yarn", factor=factor, original_max_position=_ORIGINAL, attention_factor=attention_factor)


FORMS: Mapping[str, Callable[[RopeSpec], RopeSpec]] = {
    "as they are": lambda rope: rope,
    "linear, 4": lambda rope: replace(rope, kind="linear", factor=4.0),
    "NTK, 4": lambda rope: _ntk(rope, 4.0),
    "NTK, 8": lambda rope: _ntk(rope, 8.0),
    "YaRN, 4": lambda rope: _yarn(rope, None),
    "YaRN, 4, without its temperature": lambda rope: _yarn(rope, 1.0),
}


@torch.inference_mode()
def read(decoder: Decoder, token_ids: list[int]) -> list[float]:
    """Return the perplexity of each `_BUCKET` of positions."""
    num_blocks = -(-len(token_ids) // _BLOCK_SIZE)
    pools = KVPool(decoder.spec.kv_layers, num_blocks, _BLOCK_SIZE, torch.float32).layers
    table, sums = array("i", range(num_blocks)), [0.0] * -(-len(token_ids) // _BUCKET)
    for start in range(0, len(token_ids) - 1, _CHUNK):
        ids = torch.tensor(token_ids[start : start + _CHUNK + 1])
        rows = min(_CHUNK, len(ids) - 1)
        positions = torch.arange(start, start + rows)
        attention = PagedRows(positions, AttentionPlan([ChunkSpan(rows, start, table)], _BLOCK_SIZE))
        logits = decoder.forward(ForwardBatch(ids[:rows], positions, attention), pools)
        sums[start // _BUCKET] += logits.log_softmax(-1).gather(1, ids[1 : rows + 1, None]).sum().item()
    return [math.exp(-total / min(_BUCKET, len(token_ids) - 1 - _BUCKET * number)) for number, total in enumerate(sums)]


def documents() -> str:
    """Return the documents of this repository as one text."""
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((_ROOT / "docs").rglob("*.md")))


@click.command()
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", default=20480, show_default=True, type=click.IntRange(2, _LONGEST))
@click.option("--form", "forms", multiple=True, type=click.Choice(list(FORMS)), default=tuple(FORMS))
def main(text: Path | None, tokens: int, forms: tuple[str, ...]) -> None:
    folder = ensure_demo()
    spec = build_spec(load_config(folder))
    plain = replace(spec.rope, kind="default", original_max_position=_ORIGINAL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = tokenizer.encode(documents() if text is None else text.read_text(encoding="utf-8")).ids[:tokens]
    ends = ", ".join(f"to {end:,}" for end in range(_BUCKET, len(token_ids) + _BUCKET, _BUCKET))
    click.echo(f"{len(token_ids)} tokens: perplexity of positions {ends}")
    for form in forms:
        decoder = load_decoder(folder, replace(spec, rope=FORMS[form](plain)), max_model_len=_LONGEST)
        click.echo(f"| {form} | " + " | ".join(f"{value:.2f}" for value in read(decoder, token_ids)) + " |")


if __name__ == "__main__":
    main()
