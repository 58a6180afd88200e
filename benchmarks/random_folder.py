"""`python -m benchmarks.random_folder FOLDER`: a model folder of Qwen3-Next-80B-A3B's sizes with random weights.

Three of four layers are gated delta nets with recurrent states. Layers and experts are fewer, and the vocabulary is the
demo's, whose tokenizer lies beside the weights. What a step costs does not depend on what a model has learnt.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from moeserve.model.demo import ensure_demo

_SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", type=click.IntRange(4), default=4, show_default=True)
@click.option("--experts", type=click.IntRange(10, 512), default=128, show_default=True, help="Of a layer.")
def main(folder: Path, layers: int, experts: int) -> None:
    """Write FOLDER."""
    demo = ensure_demo()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
    vocab_size = Tokenizer.from_file(str(demo / "tokenizer.json")).get_vocab_size()
    config = Qwen3NextConfig(**_SIZES, num_hidden_layers=layers, num_experts=experts, vocab_size=vocab_size)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3NextForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
