"""Families of models side by side: tokens per second times the bytes of weights that a token reads.

The shapes are published ones with fewer layers, experts and words, and with drawn weights (`moeserve.model.dummy`). All
services run at once and are asked in turns, so that a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.gpu_serve.folders import LARGE, write_folder
from launcher.offline import LLM
from moeserve.model.families import build_spec, load_config
from moeserve.model.sizes import expected_index

_NUM_WORDS = 16_384
_EXPERTS = 32  # of each layer: a token reads the same bytes as with all of them
_TOKENS = 64  # of each answer
_BYTES = 1.0625  # of a weight in int8: 32 weights share a scale of two bytes

_NEMOTRON_LAYERS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {**LARGE, "num_hidden_layers": 8, "num_experts": _EXPERTS, "vocab_size": _NUM_WORDS},
    "Gemma-4-26B-A4B": {
        "model_type": "gemma4_text",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_experts": _EXPERTS,
        "top_k_experts": 8,
        "enable_moe_block": True,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 0,
        "vocab_size": _NUM_WORDS,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "dtype": "bfloat16",
    },
    "Nemotron-3-Nano-30B-A3B": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "num_hidden_layers": 14,
        "layers_block_type": [_NEMOTRON_LAYERS[letter] for letter in "MEMEM*EMEMEM*E"],
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": _EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "vocab_size": _NUM_WORDS,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}


def active_weights(folder: Path) -> int:
    """Return how many weights of a model in a folder a token multiplies with."""
    spec = build_spec(load_config(folder))
    assert spec.moe is not None
    total = 0.0
    for name, info in expected_index(spec, "BF16").items():
        if "embed" in name and not spec.tie_embeddings:
            continue
        share = spec.moe.gate.top_k / spec.moe.num_experts if ".experts." in name else 1.0
        total += prod(info.shape) * share
    return round(total)


def tokens_per_s(model: LLM, streams: int, first: int) -> float:
    """first: the first token of the prompts, which no earlier prompt has."""
    prompts = [[first + stream, 6, 7, 9, 11] for stream in range(streams)]
    begin = time.perf_counter()
    answers = model.generate(prompts, max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - begin)


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Turns of each family, of which the median counts.")
def main(rounds: int) -> None:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        folders = {name: write_folder(scratch / name, config) for name, config in SHAPES.items()}
        settings: dict[str, Any] = {"quantization": "int8", "max_model_len": 4096}
        settings |= {"speculative_config": "none", "kv_disk_path": "none"}
        models = {name: stack.enter_context(LLM(folder, **settings)) for name, folder in folders.items()}
        for streams in (1, 16):
            rates: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(rounds + 1):
                for name, model in models.items():
                    rate = tokens_per_s(model, streams, 1000 * streams + 20 * turn)
                    if turn:  # the first one warms up
                        rates[name].append(rate)
            for name, measured in rates.items():
                read = active_weights(folders[name]) * _BYTES / 1e9
                rate = median(measured)
                click.echo(f"{name}, {streams} streams: {rate:.1f} tokens/s, {rate * read:.1f} GB/s of active weights")


if __name__ == "__main__":
    main()
