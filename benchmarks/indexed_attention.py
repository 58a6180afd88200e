"""Cold prompts of one shape with indexed attention (DeepSeek V3.2) and with full latent attention (V3), in turns.

python -m benchmarks.indexed_attention [--tokens 4000,16000] [--repeat 2] [--threads 2]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers

from benchmarks.token_engine import TokenEngine
from moeserve.config import ServeConfig
from moeserve.model.sizes import write_dummy
from moeserve.plan import SamplingParams

_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 65536,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 2048}


def _engine(folder: Path, config: transformers.PretrainedConfig, most: int) -> TokenEngine:
    config.save_pretrained(folder)
    write_dummy(folder)
    return TokenEngine(
        folder,
        ServeConfig(
            kv_cache_memory=2**30,
            block_size=16,
            max_model_len=most + 64,
            max_num_batched_tokens=1024,
            max_num_seqs=4,
            enable_prefix_caching=False,
        ),
    )


@click.command()
@click.option("--tokens", default="4000,16000", show_default=True, help="Lengths of prompts.")
@click.option("--repeat", default=2, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(tokens: str, repeat: int, threads: int) -> None:
    torch.set_num_threads(threads)
    lengths = [int(length) for length in tokens.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        engines = {
            "full": _engine(Path(scratch, "full"), transformers.DeepseekV3Config(**_SHAPE), max(lengths)),
            "indexed": _engine(
                Path(scratch, "indexed"), transformers.DeepseekV32Config(**_SHAPE, **_INDEXER), max(lengths)
            ),
        }
        generator = torch.Generator().manual_seed(1)
        click.echo("| tokens | full attention, s | indexed, s | indexed takes, times |\n|---|---|---|---|")
        for length in lengths:
            for _ in range(repeat):
                prompt = torch.randint(3, 1000, (length,), generator=generator).tolist()
                seconds = {}
                for name, engine in engines.items():
                    begin = time.perf_counter()
                    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
                    seconds[name] = time.perf_counter() - begin
                full, indexed = seconds["full"], seconds["indexed"]
                click.echo(f"| {length:,} | {full:.2f} | {indexed:.2f} | {indexed / full:.2f} |")


if __name__ == "__main__":
    main()
