"""Parity of models on transformers' code, and the table of them in docs/models.md.

`python -m tests.support.transformers_parity` plays every mixture of experts of the installed transformers and writes
the document; with names of types it plays these alone and writes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.ops import PagedRows
from kernels.state_rows import StateRows
from moeserve.model.decoder import ForwardBatch
from moeserve.model.families import supported_model_types
from moeserve.model.hf.decoder import Head, TransformersDecoder
from moeserve.model.hf.geometry import Geometry
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.spec import TransformersSpec, read_transformers_spec
from moeserve.model.kv_pool import KVPool
from moeserve.model.spec import ModelError
from radix_cache.window_blocks import blocks_before
from tests.support.tiny_transformers import VOCAB, moe_types, save_tiny

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
TOLERANCE = 1e-4
_BLOCK = 4
_PROMPTS, _MORE = (21, 10, 5, 30, 14), 5
# The tokens that each request computes in each step; requests join later, and others finish earlier.
_SHARED = 8  # Tokens of the first request whose blocks and state a later one takes over.


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. refusal: empty for a type that is served. worst: the largest difference of logits."""

    model_type: str
    layers: str = ""
    mixers: str = ""
    experts: str = ""
    missing: str = ""
    refusal: str = ""
    worst: float = 0.0

    def __str__(self) -> str:
        code = "native" if self.model_type in supported_model_types() else "transformers"
        if self.refusal:
            return f"| `{self.model_type}` | refused | | | | {self.refusal} |"
        return f"| `{self.model_type}` | {code} | {self.layers} | {self.mixers} | {self.experts} | {self.missing} |"


def play(model_type: str) -> Row:
    """Save a tiny model of a type, load it, and compare ragged steps with its own forward on each request alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            own = save_tiny(model_type, folder)
        except (ValueError, ModelError) as error:
            return Row(model_type, refusal=f"transformers cannot build it: {_first_sentence(error)}")
        try:
            spec = read_transformers_spec(folder)
            decoder = load_transformers_decoder(folder, spec)
            decoder.settle(lambda _: None)
        except ModelError as error:
            return Row(model_type, refusal=_first_sentence(error))
        return _row(model_type, own, spec, decoder)


def _row(model_type: str, own: ModellingCode, spec: TransformersSpec, decoder: TransformersDecoder) -> Row:
    together, apart = decoder.num_mixers
    geometry, missing = spec.geometry, []
    if geometry.has_opaque:
        missing.append("prefix cache; part of a request's memory lies outside the KV pool")
    if own.outer is not own.writer or own.body.config is not own.outer.config:
        missing.append("images, sound and video")
    if spec.moe is None:
        missing.append("expert parallelism, expert memory, recording")
    if spec.gpu_obstacle is not None:
        missing.append("a GPU")
    mixers = "together" if not apart else "apart" if not together else f"{together} together, {apart} apart"
    experts = "our kernels" if spec.moe is not None else "transformers'"
    return Row(
        model_type,
        _kinds(own.config, geometry),
        mixers,
        experts,
        "; ".join(missing),
        worst=worst_difference(own, decoder),
    )


def _kinds(config: Any, geometry: Geometry) -> str:
    """Return which kinds of layers a tiny model of the type has."""
    names = {str(kind).replace("_", " ") for kind in getattr(config, "layer_types", None) or ("full attention",)}
    for layer in geometry.layers:
        names |= {"indexer"} & {"indexer" for name in layer.pools if name in ("indexer_keys", "idx_keys")}
        names |= {kind.replace("_states", " state") for kind in {state.name.split(".")[0] for state in layer.states}}
    return ", ".join(sorted(names))


def worst_difference(own: ModellingCode, decoder: TransformersDecoder) -> float:
    """Return the largest difference of logits behind prompts and later tokens, from a cold cache and from a hit."""
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, VOCAB, (count + _MORE,), generator=draw).tolist() for count in _PROMPTS]
    wanted = [own_logits(own, text, count) for text, count in zip(texts, _PROMPTS, strict=True)]
    memory, worst = Memory(decoder, texts), 0.0
    done = [0] * len(texts)
    kept: list[Tensor] = []
    for number in range(100):
        chunks = _chunks(texts, done, number)
        if not chunks:
            break
        for (request, _, end), row in zip(chunks, memory.step(chunks), strict=True):
            done[request] = end
            if end >= _PROMPTS[request]:
                worst = max(worst, (row - wanted[request][end - _PROMPTS[request]]).abs().max().item())
            if request == 0 and end == _SHARED:
                kept = [state[0].clone() for state in memory.states]
    if not decoder.spec.geometry.has_opaque:
        worst = max(worst, _after_a_hit(memory, kept, texts[0], wanted[0]))
    return worst


def _chunks(texts: Sequence[Sequence[int]], done: Sequence[int], step: int) -> list[tuple[int, int, int]]:
    """(request, first token, end): prompts in chunks of several sizes, single tokens behind them."""
    chunks = []
    for request, text in enumerate(texts):
        start, prompt = done[request], _PROMPTS[request]
        if start == len(text) or request > 1 + step:
            continue
        count = 1 if start >= prompt else min((3, 5, 8, 7)[(step + request) % 4], prompt - start)
        if start < _SHARED < start + count:
            count = _SHARED - start
        chunks.append((request, start, start + count))
    return chunks


def _after_a_hit(memory: Memory, kept: Sequence[Tensor], text: Sequence[int], wanted: Tensor) -> float:
    """Continue behind the shared tokens in other blocks and another slot, from the kept states."""
    for state, value in zip(memory.states, kept, strict=True):
        state[-1].copy_(value)
    request = memory.add_sharing(0, text)
    worst, start = 0.0, _SHARED
    for end in (_PROMPTS[0], *range(_PROMPTS[0] + 1, len(text) + 1)):
        row = memory.step([(request, start, end)])[0]
        worst = max(worst, (row - wanted[end - _PROMPTS[0]]).abs().max().item())
        start = end
    return worst


@torch.inference_mode()
def own_logits(own: ModellingCode, text: Sequence[int], num_prompt: int) -> Tensor:
    """[_MORE + 1, vocab]: the prompt in one go and then token by token, through the model's own forward and cache."""
    cache, rows, start = None, [], 0
    for end in (num_prompt, *range(num_prompt + 1, len(text) + 1)):
        ids, positions = torch.tensor([text[start:end]]), torch.arange(start, end)[None]
        out = own.body(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, end
        rows.append(out.last_hidden_state[0, -1:])
    return Head(own)(torch.cat(rows))


class Memory:
    """KV blocks in scattered order and state slots: what a pool and a scheduler would hold."""

    def __init__(self, decoder: TransformersDecoder, texts: list[list[int]]) -> None:
        counts = [-(-len(text) // _BLOCK) for text in texts]
        num_blocks = sum(counts) + counts[0]
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._free, self._decoder, self._texts = free, decoder, [list(text) for text in texts]
        self._tables = [array("i", [free.pop() for _ in range(count)]) for count in counts]
        # Layers with a window have the same blocks in another order.
        self._layers, self._window_of = decoder.spec.kv_layers, list(reversed(range(num_blocks)))
        self._window = max((layer.window or 0 for layer in self._layers), default=0)
        self._kv = KVPool(self._layers, num_blocks, _BLOCK, decoder.dtype, num_window_blocks=num_blocks)
        states = (state for layer in decoder.spec.geometry.layers for state in layer.states)
        self.states = [torch.zeros((len(texts) + 1, *state.shape), dtype=decoder.dtype) for state in states]

    def add_sharing(self, request: int, text: Sequence[int]) -> int:
        """Return a new request with the first blocks of another one; its state slot is the last."""
        shared = _SHARED // _BLOCK
        table = self._tables[request]
        self._tables.append(table[:shared] + array("i", [self._free.pop() for _ in table[shared:]]))
        self._texts.append(list(text))
        return len(self._texts) - 1

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits of each chunk's last row."""
        ids: list[int] = []
        positions: list[int] = []
        bounds = [0]
        paged, windows = _Places(), _Places()
        for request, start, end in chunks:
            table = self._tables[request]
            ids += self._texts[request][start:end]
            positions += range(start, end)
            paged.add(table, start, end)
            windows.add(self._window_table(table, start), start, end)
            bounds.append(bounds[-1] + end - start)
            if start == 0:
                for state in self.states:
                    state[request].zero_()
        batch = ForwardBatch(
            torch.tensor(ids),
            torch.tensor(positions),
            paged.rows(),
            torch.tensor([bound - 1 for bound in bounds[1:]]),
            states=StateRows(
                torch.tensor(bounds),
                torch.tensor([request for request, _, _ in chunks]),
                max(end - start for _, start, end in chunks),
            ),
            window_attention=windows.rows() if self._window else None,
        )
        logits = self._decoder.forward(batch, [*self._kv.layers, *((state, None) for state in self.states)])
        for request, _, end in chunks:
            self._spoil(request, end)
        return logits

    def _first_seen(self, position: int) -> int:
        """Return the first block that a token at a position sees in layers with a window."""
        return max(0, position // _BLOCK - blocks_before(self._window, _BLOCK))

    def _window_table(self, table: array[int], start: int) -> array[int]:
        first = self._first_seen(start)
        seen = array("i", [self._window_of[block] for block in table[first:]])
        return seen[:1] * first + seen

    def _spoil(self, request: int, end: int) -> None:
        """Overwrite blocks that have left the window of a request and of requests that share its first tokens."""
        left = set(range(self._first_seen(end))) - set(range(self._first_seen(_SHARED), _SHARED // _BLOCK))
        for block in sorted(left):
            first = self._window_of[self._tables[request][block]] * _BLOCK
            for layer, (keys, _) in zip(self._layers, self._kv.layers, strict=True):
                if layer.window is not None:
                    keys[:, first : first + _BLOCK] = 1e4


class _Places:
    """The rows of a step in one kind of blocks."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._spans: list[ChunkSpan] = []

    def add(self, table: array[int], start: int, end: int) -> None:
        self._slots += [table[p // _BLOCK] * _BLOCK + p % _BLOCK for p in range(start, end)]
        self._spans.append(ChunkSpan(end - start, start, table[: -(-end // _BLOCK)]))

    def rows(self) -> PagedRows:
        return PagedRows(torch.tensor(self._slots), AttentionPlan(self._spans, _BLOCK))


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/")
    return text if len(text) <= 300 else text[:300].rsplit(" ", 1)[0] + " ..."


_HEAD = """# Models

Which mixtures of experts moeserve serves, as a test has found it with transformers {version}: it builds a tiny model of
every type with random weights, serves several requests in one batch, prompts in chunks, from a cold cache and from a
hit, and compares with the model's own forward (largest difference of logits: {tolerance:g}).
`python -m tests.support.transformers_parity` writes this page.

- **Code**: `native` is our own decoder; `--model-impl transformers` computes these types by transformers' code, too.
- **Mixers**, on transformers' code: `together` is one call for all requests of a step. `apart` is one call per request
  (single tokens of layers that keep nothing but states share one); projections are read once per request there.
  Attention modules whose code says what llama's or qwen3's says are computed by our kernels from the projections on,
  and where layers with states are called together, so are their convolutions, delta rules and Mamba scans.
- **Experts**: by our kernels, or by transformers' own code where our kernels do not know their form or activation.
- **Weights** on transformers' code stay quantised as on our own ([quantization](quantization.md)). GGUF files: the
  architectures of [gguf](gguf.md). Over them, chunks, the cache, preemptions, drafts, and few slots of experts with
  prefetching change no bit (`tests/cpu/test_transformers_packed_promises.py`), and ranks no token
  (`test_transformers_experts.py`).
- Text decoders that transformers has as a part of a model alone (`step3p5`, `deepseek_ocr2_text`) are served as that
  model (`step3p7`, `deepseek_ocr2`).
- **A GPU** (`--device cuda`) takes models on transformers' code too, with the kernels of our own, where layers keep
  keys, values and states; the others say `a GPU` under *not supported*. Triton's interpreter has computed them, no
  device has. Decode steps are not captured as CUDA graphs, and the checks of `--device auto` do not cover this code.

{counts}

| type | code | kinds of layers (of the tiny model) | mixers | experts | not supported |
|---|---|---|---|---|---|
"""


def document(rows: Sequence[Row]) -> str:
    served = sum(not row.refusal for row in rows)
    counts = f"{served} of {len(rows)} types are served."
    head = _HEAD.format(version=transformers.__version__, tolerance=TOLERANCE, counts=counts)
    return head + "\n".join(map(str, rows)) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    rows, asked = [], sys.argv[1:]
    for model_type in asked or moe_types():
        row = play(model_type)
        print(f"{row.worst:.1e} {row}", flush=True)
        rows.append(row)
    if wrong := [row.model_type for row in rows if row.worst > TOLERANCE]:
        raise SystemExit(f"not at parity, so nothing is written: {', '.join(wrong)}")
    if not asked:
        DOCUMENT.write_text(document(rows))


if __name__ == "__main__":
    main()
