"""The results of the engine in this process, for `freeze`: plans, and tiny models and the demo on a CPU.

`python -m tests.behaviour.in_process FOLDER [--models MODEL ...] [--parts PART ...]` saves the models into `FOLDER`.
Its first line of JSON tells the machine and the models' weights; then comes a line for each part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from benchmarks.token_engine import Completion, TokenEngine

# All that this folder takes from the product, and the only lines to follow it when it moves.
from moeserve.config import ServeConfig
from moeserve.model.demo import ensure_demo
from moeserve.plan import SamplingParams
from tests.behaviour.cases import (
    DEMO_TEXTS,
    MODELS,
    PROMPTS,
    SAMPLING,
    VOCAB_SIZE,
    Record,
    bits_of,
)
from tests.support import kernel_bits
from tests.support.plan_script import digests
from tests.support.tiny_model import write_model_dir
from tests.support.tiny_models import save

_TINY = ServeConfig(
    threads=1,
    kv_cache_memory=2**20,
    block_size=4,
    max_model_len=160,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    expert_prefetch="off",
)
_DEMO = ServeConfig(threads=1, kv_cache_memory=2**26, max_model_len=512, expert_prefetch="off")
_DEMO_EXPERT_MEMORY = 512 * 2**20
_DEMO_TOP = 1000
_DEMO_TOKENS = 8
_TOKENS = 6
_BATCHES = 10


def arithmetic() -> str:
    """A digest of what this machine's libraries make of a few operations: where it differs, so may bits of logits."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.rand(size, generator=generator) * 4 - 2 for size in ((9, 64), (64, 96)))
    product = torch.nn.functional.linear(left, right.T)
    results = [
        product,
        torch.nn.functional.linear(left[:1], right.T),
        left.exp(),
        left.tanh(),
        left.sigmoid(),
        left.cos(),
        left.abs().rsqrt(),
        product.log_softmax(-1),
        left.bfloat16() @ right.bfloat16(),
        torch.from_numpy(left.numpy() @ right.numpy()),
        torch.from_numpy(np.exp(left.numpy())),
    ]
    return sha256(b"".join(result.float().contiguous().numpy().tobytes() for result in results)).hexdigest()[:16]


def weights_of(model: Any) -> str:
    """A digest of every parameter and buffer."""
    found = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def build(folder: Path, models: Sequence[str]) -> dict[str, Any]:
    """Save the tiny models, each with a tokenizer; the machine and their weights."""
    weights = {}
    for name in models:
        write_model_dir(folder / name)
        weights[name] = weights_of(save(name, folder / name))
    machine = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": arithmetic(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}",
    }
    return {"machine": machine, "weights": weights, "has_gpu": torch.cuda.is_available()}


def record_of(completions: Sequence[Completion]) -> Record:
    return {
        "tokens": [completion.token_ids for completion in completions],
        "bits": [" ".join(bits_of(entry.logprob, entry.top) for entry in answer.logprobs) for answer in completions],
        "cached": [completion.num_cached_tokens for completion in completions],
    }


def in_process(
    model: Path,
    config: ServeConfig,
    expert_memory: int,
    store: Path | None,
    prompts: list[list[int]],
    greedy: SamplingParams,
) -> dict[str, Record]:
    """Greedy tokens of a cold and of a warm cache, of few expert slots and in bfloat16, and tokens drawn by a seed."""
    llm = TokenEngine(model, config)
    records = {"cold": record_of(llm.generate(prompts, greedy)), "hit": record_of(llm.generate(prompts, greedy))}
    drawn = SamplingParams(**SAMPLING, max_tokens=greedy.max_tokens, logprobs=greedy.logprobs)
    records["sampled"] = record_of(llm.generate(prompts, drawn))
    llm.close()
    few = replace(
        config,
        expert_memory=expert_memory,
        expert_prefetch="gate",
        expert_store_dir=None if store is None else str(store),
    )
    llm = TokenEngine(model, few)
    records["few-slots"] = record_of(llm.generate(prompts, greedy))
    llm.close()
    return records


def tiny(folder: Path, name: str) -> dict[str, Record]:
    greedy = SamplingParams(max_tokens=_TOKENS, temperature=0.0, logprobs=VOCAB_SIZE)
    memory = MODELS[name].expert_memory
    records = in_process(folder / name, _TINY, memory, folder / "stores" / name, PROMPTS, greedy)
    rounded = TokenEngine(folder / name, replace(_TINY, dtype="bfloat16"))
    records["bfloat16"] = record_of(rounded.generate(PROMPTS, greedy))
    return records


def demo() -> dict[str, Record]:
    model = ensure_demo()
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in DEMO_TEXTS]
    greedy = SamplingParams(max_tokens=_DEMO_TOKENS, temperature=0.0, logprobs=_DEMO_TOP)
    # The file of experts stays in the model cache, beside the demo.
    return in_process(model, _DEMO, _DEMO_EXPERT_MEMORY, None, prompts, greedy)


def plans() -> dict[str, Record]:
    return {f"fcfs-{depth}": {"plans": [" ".join(digest[:6] for digest in digests(depth))]} for depth in (0, 1)}


def kernels() -> dict[str, Record]:
    """What the compiled kernels make of random numbers: the same on every processor."""
    return {case: {"bits": [bits]} for case, bits in kernel_bits.digests(_BATCHES).items()}


def measure(part: str, folder: Path) -> dict[str, Record]:
    kind, _, model = part.partition("/")
    if kind == "plans":
        return plans()
    if kind == "kernels":
        return kernels()
    return demo() if kind == "demo" else tiny(folder, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--parts", nargs="*", default=[])
    chosen = parser.parse_args()
    print(json.dumps(build(chosen.folder, chosen.models)), flush=True)
    for part in chosen.parts:
        records = measure(part, chosen.folder)
        print(json.dumps({f"{part}/{case}": record for case, record in records.items()}), flush=True)


if __name__ == "__main__":
    main()
