"""The process that builds the demo checkpoint, so that torch and a gigabyte of memory leave with it.

The demo is SmolLM2-135M-Instruct as a Mixtral-format mixture of experts. Weights are written in bfloat16. The reference
is the dense model in bfloat16: splitting its feed-forward layers and scaling `down` by a power of two
are exact in that dtype, so both compute the same function up to the order of float additions at run time.

The process writes one JSON event per line to its standard output and exits 0, or 1 after an event with `error`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import linear, normalize, scaled_dot_product_attention, silu

from moeserve.model.demo import REQUIREMENT, Event, Job, locate_gguf
from moeserve.model.spec import ModelError, Progress, silent

CALIBRATION_TOKENS = 2048  # of text, from which the gates of the demo are made
# The first tokens of any text draw attention from all others and have extreme activations: they would make a centroid.
SKIPPED_TOKENS = 16
_ITERATIONS = 16  # rounds of the clustering of inputs
# The demo serves contexts of this many times the length that its model was trained with; see `stretched_rope`.
CONTEXT_FACTOR = 4
FFN = ("gate_proj", "up_proj", "down_proj")
_LAYERS_PER_SHARD = 8
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# SmolLM2's model card recommends these. At temperature 1 so small a model soon loses the thread.
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

# Returns the weights of the layer of an index by their name within it; called once per layer, in order.
Layers = Callable[[int], dict[str, Tensor]]


def main(argument: str, build: Callable[..., None] | None = None) -> int:
    """Do the `Job` in the argument and return the exit status. build: `build_demo`, or another function like it."""
    job = msgspec.json.decode(argument, type=Job)
    try:
        (build or build_demo)(
            Path(job.out_dir),
            experts=job.experts,
            top_k=job.top_k,
            progress=lambda stage, done, total: _send(Event(stage, done, total)),
        )
    except ModelError as error:
        _send(Event(error=str(error)))
    except (OSError, SafetensorError, ValueError) as error:
        _send(Event(error=f"The demo model could not be built: {error}."))
    else:
        return 0
    return 1


def _send(event: Event) -> None:
    # A write to a parent that is gone fails with a broken pipe, which ends this process as well.
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def build_demo(out_dir: Path, *, experts: int = 8, top_k: int = 2, progress: Progress | None = None) -> None:
    """Write the demo mixture with `experts` experts per layer, `top_k` active, into the empty or new `out_dir`.

    One pass over the layers dequantises each, runs it on the calibration text, splits and writes it, so memory stays
    near one shard. Raise ModelError if the source package is missing, ValueError for a split that is not exact.
    """
    report = progress or silent
    report("read source", 0, 0)
    source = GgufSource(locate_gguf())
    check_partition(source.shape.intermediate_size, experts, top_k)
    config = mixtral_config(source.shape, experts=experts, top_k=top_k)
    write_checkpoint(out_dir, source, config, _MixtureLayers(source, experts, top_k), report)


class _MixtureLayers:
    """Turns dense layers into mixture layers, in order."""

    def __init__(self, source: GgufSource, experts: int, top_k: int) -> None:
        self._source, self._groups, self._top_k = source, experts // top_k, top_k
        token_ids = build_tokenizer(source.vocabulary).encode(calibration_text()).ids[:CALIBRATION_TOKENS]
        self._forward = DenseForward(source.shape, source.embedding(), torch.tensor(token_ids))

    def __call__(self, index: int) -> dict[str, Tensor]:
        weights = self._source.layer(index)
        ffn_inputs = self._forward.step(weights)[SKIPPED_TOKENS:]
        generator = torch.Generator().manual_seed(index)
        centroids = gate_centroids(ffn_inputs, self._groups, generator=generator)
        gate, up, down = (weights.pop(f"mlp.{name}.weight") for name in FFN)
        tied = split_ffn(gate, up, down, centroids, top_k=self._top_k, generator=generator)
        weights["block_sparse_moe.gate.weight"] = tied.moe_gate
        for expert, (w1, w3, w2) in enumerate(zip(tied.gate, tied.up, tied.down, strict=True)):
            prefix = f"block_sparse_moe.experts.{expert}"
            weights |= {f"{prefix}.w1.weight": w1, f"{prefix}.w2.weight": w2, f"{prefix}.w3.weight": w3}
        return weights


def write_checkpoint(
    out_dir: Path, source: GgufSource, config: dict[str, Any], layers: Layers, report: Progress
) -> None:
    """Write all files of a checkpoint into the empty or new `out_dir`."""
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text_files(out_dir, source.shape, source.vocabulary, config)
    shards = _shards(source, layers, report)
    count = -(-source.shape.num_layers // _LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    total_size = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, out_dir / name, metadata={"format": "pt"})
        (out_dir / name).chmod(0o644)  # safetensors makes files for the owner alone; all others here are readable.
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(out_dir / "model.safetensors.index.json", index)


def _shards(source: GgufSource, layers: Layers, report: Progress) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of one file after another, so that memory holds a single file's tensors."""
    total = source.shape.num_layers
    shard = {"model.embed_tokens.weight": source.embedding()}
    for index in range(total):
        report("build layers", index, total)
        shard |= {f"model.layers.{index}.{name}": weight for name, weight in layers(index).items()}
        if index == total - 1:
            shard["model.norm.weight"] = source.final_norm()
            report("build layers", total, total)
            yield shard
        elif (index + 1) % _LAYERS_PER_SHARD == 0:
            yield shard
            shard = {}


def calibration_text() -> str:
    return files("moeserve.model").joinpath("calibration.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class TiedExperts:
    """A dense FFN rewritten as a mixture of experts that computes exactly the same function.

    The experts form G = E / k groups. Each group is a random partition of the FFN's neurons into k slices, one slice
    per expert, so the k experts of a group together are the whole FFN. They share one row of the gate, so the top k
    experts are always one whole group, each with weight exactly 1 / k; `down` times k undoes that weight. The token
    decides the group: rows of the gate are k-means centroids of FFN inputs. Every expert's weights differ from every
    other's, so a token sent to a wrong expert changes the text.

    moe_gate: [E, hidden]. gate, up: [I / k, hidden] per expert. down: [hidden, I / k] per expert.
    """

    moe_gate: Tensor
    gate: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


def check_partition(intermediate_size: int, experts: int, top_k: int) -> None:
    """Raise ValueError unless the FFN splits exactly into `experts` tied experts with `top_k` active."""
    if top_k < 1 or top_k & (top_k - 1):
        raise ValueError(f"top_k is {top_k}, but must be a power of two: only then is scaling by it exact")
    if experts < top_k or experts % top_k:
        raise ValueError(f"experts is {experts}, but must be a multiple of top_k, {top_k}")
    if intermediate_size % top_k:
        raise ValueError(f"the FFN's {intermediate_size} neurons do not divide by top_k, {top_k}")


def split_ffn(
    gate: Tensor, up: Tensor, down: Tensor, centroids: Tensor, *, top_k: int, generator: torch.Generator
) -> TiedExperts:
    """Split `gate`, `up` [I, hidden] and `down` [hidden, I] into len(centroids) * top_k tied experts.

    centroids: [G, hidden], any float dtype; the gate takes the dtype of the weights. Expert e belongs to group e % G,
    so the experts of a group lie on different ranks when ranks own contiguous ranges of experts.
    """
    groups, intermediate = len(centroids), gate.shape[0]
    check_partition(intermediate, groups * top_k, top_k)
    slices: list[Tensor] = [torch.empty(0)] * (groups * top_k)
    for group in range(groups):
        neurons = torch.randperm(intermediate, generator=generator).view(top_k, -1)
        for part in range(top_k):
            slices[group + groups * part] = neurons[part]
    return TiedExperts(
        moe_gate=centroids.to(gate.dtype).repeat(top_k, 1),
        gate=tuple(gate[s].contiguous() for s in slices),
        up=tuple(up[s].contiguous() for s in slices),
        down=tuple((down[:, s] * top_k).contiguous() for s in slices),
    )


def gate_centroids(ffn_inputs: Tensor, groups: int, *, generator: torch.Generator) -> Tensor:
    """Return directions [groups, hidden] that separate the kinds of tokens in `ffn_inputs` [tokens, hidden] float32
    apart.

    They come from spherical k-means of the centred inputs. The gate has no bias and sees inputs that are not centred,
    so the direction of the mean is projected out of the centroids. Then the choice depends on how tokens differ, and
    the scores of groups lie far apart relative to their size, which keeps ties rare in low precision.
    """
    mean = ffn_inputs.mean(0)
    points = normalize(ffn_inputs - mean, dim=-1)
    centroids = points[torch.randperm(len(points), generator=generator)[:groups]]
    for _ in range(_ITERATIONS):
        nearest = (points @ centroids.T).argmax(-1)
        rows = []
        for group in range(groups):
            members = points[nearest == group]
            if len(members) == 0:
                members = points[torch.randint(len(points), (1,), generator=generator)]
            rows.append(members.mean(0))
        centroids = normalize(torch.stack(rows), dim=-1)
    axis = normalize(mean, dim=0)
    return normalize(centroids - (centroids @ axis)[:, None] * axis, dim=-1)


class DenseForward:
    """The dense model's forward in float32: carries the hidden states of one prompt through one layer after another."""

    def __init__(self, shape: DenseShape, embedding: Tensor, token_ids: Tensor) -> None:
        self._shape = shape
        self._hidden = embedding[token_ids].float()
        positions = torch.arange(len(token_ids), dtype=torch.float32)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    @property
    def hidden(self) -> Tensor:
        """[tokens, hidden] float32, after the layers so far."""
        return self._hidden

    @torch.inference_mode()
    def step(self, weights: dict[str, Tensor]) -> Tensor:
        """Run one layer and return the input of its FFN, [tokens, hidden] float32."""
        ffn_input = self.attend(weights)
        gate, up, down = (weights[f"mlp.{name}.weight"].float() for name in ("gate_proj", "up_proj", "down_proj"))
        self.add(linear(silu(linear(ffn_input, gate)) * linear(ffn_input, up), down))
        return ffn_input

    @torch.inference_mode()
    def attend(self, weights: dict[str, Tensor]) -> Tensor:
        """Run a layer up to its FFN and return the FFN's input, [tokens, hidden] float32. `add` completes the layer."""
        w = {name.removesuffix(".weight"): weight.float() for name, weight in weights.items() if "mlp." not in name}
        self._hidden = self._hidden + self._attention(self._norm(w["input_layernorm"]), w)
        return self._norm(w["post_attention_layernorm"])

    @torch.inference_mode()
    def add(self, ffn_output: Tensor) -> None:
        """Add the output of the layer's FFN, [tokens, hidden]."""
        self._hidden = self._hidden + ffn_output

    def _norm(self, weight: Tensor) -> Tensor:
        return rms_norm(self._hidden, weight, self._shape.rms_norm_eps)

    def _attention(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        q = self._rotate(self._heads(x, w["self_attn.q_proj"]))
        k = self._rotate(self._heads(x, w["self_attn.k_proj"]))
        v = self._heads(x, w["self_attn.v_proj"])
        mixed = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return linear(mixed.transpose(0, 1).flatten(1), w["self_attn.o_proj"])

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).view(len(x), -1, self._shape.head_dim).transpose(0, 1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class DenseShape:
    """Sizes and constants of a llama-type dense model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary: tokens in id order, merges in rank order, ids of control tokens."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_ids: tuple[int, ...]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str


class GgufSource:
    """The dense model in a GGUF file: shape, vocabulary, and tensors dequantised one at a time."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path} holds a model of type {architecture!r}, but the demo is built from a llama type.")

    @cached_property
    def shape(self) -> DenseShape:
        return DenseShape(
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=self._field("llama.embedding_length"),
            intermediate_size=self._field("llama.feed_forward_length"),
            num_layers=self._field("llama.block_count"),
            num_heads=self._field("llama.attention.head_count"),
            num_kv_heads=self._field("llama.attention.head_count_kv"),
            head_dim=self._field("llama.rope.dimension_count"),
            max_positions=self._field("llama.context_length"),
            # Stored as float32: the shortest decimal is the intended value.
            rms_norm_eps=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            rope_theta=float(self._field("llama.rope.freq_base")),
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        control = 3  # GGUF token type CONTROL
        types = self._field("tokenizer.ggml.token_type")
        pairs = (merge.split(" ") for merge in self._field("tokenizer.ggml.merges"))
        return Vocabulary(
            tokens=tuple(self._field("tokenizer.ggml.tokens")),
            merges=tuple((left, right) for left, right in pairs),
            control_ids=tuple(i for i, kind in enumerate(types) if kind == control),
            bos_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_id=self._field("tokenizer.ggml.eos_token_id"),
            unk_id=self._field("tokenizer.ggml.unknown_token_id"),
            pad_id=self._field("tokenizer.ggml.padding_token_id"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def embedding(self) -> Tensor:
        """Return the token embedding, also the output head (tied): [vocab, hidden] bfloat16."""
        return self._read("token_embd.weight")

    def final_norm(self) -> Tensor:
        """[hidden] bfloat16."""
        return self._read("output_norm.weight")

    def layer(self, index: int) -> dict[str, Tensor]:
        """Return one layer's weights in bfloat16 under their transformers names (`self_attn.q_proj.weight`, ...)."""
        weights = {}
        for gguf_name, name in _LAYER_NAMES.items():
            weight = self._read(f"blk.{index}.{gguf_name}.weight")
            if gguf_name == "attn_q":
                weight = _halves_from_pairs(weight, self.shape.num_heads)
            elif gguf_name == "attn_k":
                weight = _halves_from_pairs(weight, self.shape.num_kv_heads)
            weights[f"{name}.weight"] = weight
        return weights

    def _read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ModelError(f"The GGUF of the demo model lacks the field {name!r}: reinstall {REQUIREMENT}.")
        return field.contents()


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder q or k rows [heads * dim, hidden] from GGUF's rotary pairs (2i, 2i+1) to halves (i, i + dim/2)."""
    rows, hidden = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden).contiguous()


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the byte-level BPE tokenizer. Digits are split one by one first, as in training."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in vocabulary.control_ids]
    )
    return tokenizer


def write_text_files(out_dir: Path, shape: DenseShape, vocabulary: Vocabulary, config: dict[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and config.json into `out_dir`."""
    build_tokenizer(vocabulary).save(str(out_dir / "tokenizer.json"))
    write_json(out_dir / "tokenizer_config.json", _tokenizer_config(shape, vocabulary))
    ends = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "pad_token_id": vocabulary.pad_id}
    write_json(out_dir / "generation_config.json", ends | _SAMPLING)
    write_json(out_dir / "config.json", config | ends)


def mixtral_config(shape: DenseShape, *, experts: int, top_k: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": shape.intermediate_size // top_k,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        **common_config(shape),
    }


def write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def common_config(shape: DenseShape) -> dict[str, Any]:
    """Return the part of config.json that no split changes."""
    return {
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "max_position_embeddings": CONTEXT_FACTOR * shape.max_positions,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": stretched_rope(shape),
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def stretched_rope(shape: DenseShape) -> dict[str, Any]:
    """Return rope parameters whose angles are the model's own up to its context, and follow a larger base beyond it.

    The larger base follows NTK-aware scaling: the fastest channel keeps its angle, the slowest turns
    `CONTEXT_FACTOR` times more slowly.
    """
    last = shape.head_dim - 2
    return {
        "rope_type": "longrope",
        "rope_theta": shape.rope_theta,
        "original_max_position_embeddings": shape.max_positions,
        "factor": float(CONTEXT_FACTOR),
        "attention_factor": 1.0,
        "short_factor": [1.0] * (shape.head_dim // 2),
        "long_factor": [CONTEXT_FACTOR ** (channel / last) for channel in range(0, shape.head_dim, 2)],
    }


def _tokenizer_config(shape: DenseShape, vocabulary: Vocabulary) -> dict[str, Any]:
    special = [vocabulary.tokens[i] for i in vocabulary.control_ids]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "additional_special_tokens": special,
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_FACTOR * shape.max_positions,
        "chat_template": vocabulary.chat_template,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
