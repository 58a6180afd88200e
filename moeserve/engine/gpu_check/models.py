"""Tiny models on a device, by all that a service does between a request's tokens and its answer's."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_scheduler
from moeserve.engine.rank import Rank
from moeserve.model.sizes import write_dummy
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.steps import LocalExecutor, Steps

EXPECTED = Path(__file__).parent / "expected.json"
_MAX_TOKENS = 5
# Between them the models have experts with and without biases, shared ones, windows, sinks and delta rules.
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "dtype": "float32",
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}
_SINKS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe"},
    "gpt_oss": {**_SIZES, **_SINKS, "model_type": "gpt_oss"},
    "qwen3_next": {**_SIZES, **_EXPERTS, **_DELTA, "model_type": "qwen3_next"},
}
# The third one begins like the second, which by then is cached.
_LENGTHS = (3, 24, 24)
_SHARED = 18


def expected_tokens() -> dict[str, list[list[int]]]:
    """Return what a CPU answered to `prompts`, by model."""
    found: dict[str, list[list[int]]] = json.loads(EXPECTED.read_text())
    return found


def wrong_tokens(name: str, device: str) -> str:
    """Return why the tokens of the tiny model `name` are not the recorded ones; empty if they are."""
    with TemporaryDirectory(prefix="moeserve-check-") as folder:
        found, expected = answers(write_model(CONFIGS[name], Path(folder) / "model"), device), expected_tokens()[name]
    return "" if found == expected else f"tokens {found} instead of {expected}"


def write_model(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a model without weights to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    write_dummy(folder)
    return folder


def answers(folder: Path, device: str) -> list[list[int]]:
    """Return the greedy tokens after each of the prompts, from a model in float32 on `device`, `cpu` or `cuda`."""
    config = ServeConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        block_size=16,
        kv_cache_memory=4 * 2**20,
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        speculative_config="none",
    )
    loaded = load_rank(folder, plan_model(folder, config), config, lambda _: None)
    rank = loaded.start()
    try:
        return list(_generate(rank, config))
    finally:
        rank.close()


def _generate(rank: Rank, config: ServeConfig) -> Iterator[list[int]]:
    """Yield the tokens of each prompt: the first two are served together, the third alone."""
    model = rank.model
    caches = build_caches(config, model.kv)
    scheduler = build_scheduler(config, model.kv, caches, model.device, depth=rank.depth)
    steps = Steps(scheduler, LocalExecutor(rank.runner), rank.depth)
    requests = [
        Request(str(number), prompt, SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0))
        for number, prompt in enumerate(prompts(model.spec.vocab_size))
    ]
    for together in (requests[:2], requests[2:]):
        told: dict[str, list[int]] = {request.request_id: [] for request in together}
        for request in together:
            scheduler.add(request)
        while (outputs := steps.advance()) is not None:
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                told[output.request.request_id] += [] if output.token_id is None else [output.token_id]
        yield from told.values()


def prompts(vocab_size: int) -> Sequence[array[int]]:
    found = [
        array("i", ((7 * place + 31 * number + 3) % vocab_size for place in range(length)))
        for number, length in enumerate(_LENGTHS)
    ]
    found[2][:_SHARED] = found[1][:_SHARED]
    return found
