"""The dense model that the demo mixture equals, as a checkpoint of type llama."""

from __future__ import annotations

from pathlib import Path

from moeserve.model.demo_build import GgufSource, common_config, write_checkpoint
from moeserve.model.spec import silent


def build_dense(gguf: Path, out_dir: Path) -> None:
    """Write the checkpoint of a GGUF file into the empty or new `out_dir`."""
    source = GgufSource(gguf)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": source.shape.intermediate_size,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        **common_config(source.shape),
    }
    write_checkpoint(out_dir, source, config, source.layer, silent)
