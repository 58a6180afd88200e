"""A random llama-type model in a GGUF, small enough to build demos from in a second."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, DIM, NEURONS, LAYERS = 64, 4, 2, 16, 128, 10
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "hel"]
MERGES = ["h e", "he l"]


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder q or k rows as a GGUF holds them: rotary pairs side by side."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def write_gguf(path: Path, architecture: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """Write a random llama-type model; returns the q and k weights it began with."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(TOKENS))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(DIM)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def add(name: str, rows: int, columns: int, quant: Quant) -> None:
        weight = rng.normal(0, 0.15, (rows, columns)).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(weight, quant), raw_dtype=quant)

    originals = {}
    add("token_embd.weight", len(TOKENS), HIDDEN, Quant.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            weight = rng.normal(0, 0.3, (heads * DIM, HIDDEN)).astype(np.float32)
            originals[f"{layer}.{name}"] = weight
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(pairs_from_halves(weight, heads)))
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * DIM, HIDDEN, Quant.Q4_1)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * DIM, Quant.Q4_1)
        add(f"blk.{layer}.ffn_gate.weight", NEURONS, HIDDEN, Quant.Q4_1)
        add(f"blk.{layer}.ffn_up.weight", NEURONS, HIDDEN, Quant.Q4_1)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, NEURONS, Quant.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return originals
