"""Build the demo whose experts do not come in groups, in the builder's process.

Of every feed-forward layer of the dense model, the neurons that matter most on average always run. The others form
experts of equal size, by balanced k-means over their activity, after MoEfication (arXiv 2110.01786). The output is the
plain sum of the chosen experts, so all experts together are the dense layer and fewer are an approximation. The build
measures how much worse than the dense model it is on text that it did not learn from, layer by layer beside the dense
model, and keeps that in `quality.json`. The checkpoint is of type `moeserve_demo`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, silu

from moeserve.model.demo import QUALITY_NAME, Quality, locate_gguf
from moeserve.model.demo_build import (
    CALIBRATION_TOKENS,
    FFN,
    SKIPPED_TOKENS,
    DenseForward,
    DenseShape,
    GgufSource,
    build_tokenizer,
    calibration_text,
    common_config,
    main,
    rms_norm,
    write_checkpoint,
    write_json,
)
from moeserve.model.spec import Progress, silent

_HELD_OUT_TOKENS = 1024  # of text that the split has not seen, for the perplexity
_ITERATIONS = 6  # rounds of the clustering of neurons
_RIDGE = 0.01  # damping, in mean squares of a state's elements
_ROWS_AT_ONCE = 128


def build_split(out_dir: Path, *, experts: int, top_k: int, progress: Progress | None = None) -> None:
    """Write the neuron-split model with `experts` experts per layer, `top_k` active, into the empty or new `out_dir`.

    Raise ModelError if the source package is missing, ValueError if the neurons cannot be shared out so.
    """
    report = progress or silent
    report("read source", 0, 0)
    source = GgufSource(locate_gguf())
    shared = num_shared(source.shape.intermediate_size, experts)
    config = split_config(source.shape, experts=experts, top_k=top_k, shared=shared)
    layers = _SplitLayers(source, experts, top_k)
    write_checkpoint(out_dir, source, config, layers, report)
    write_json(out_dir / QUALITY_NAME, msgspec.to_builtins(layers.quality()))


def split_config(shape: DenseShape, *, experts: int, top_k: int, shared: int) -> dict[str, Any]:
    """Return config.json of the model, whose first `shared` neurons always run."""
    return {
        "architectures": ["MoeserveDemoForCausalLM"],
        "model_type": "moeserve_demo",
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": (shape.intermediate_size - shared) // experts,
        "shared_expert_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        **common_config(shape),
    }


class _SplitLayers:
    """Turns dense layers into split ones, in order, and carries held-out text through both."""

    def __init__(self, source: GgufSource, experts: int, top_k: int) -> None:
        self._source, self._experts, self._top_k = source, experts, top_k
        learnt, held_out = _texts(source)
        embedding = source.embedding()
        self._calibration = [DenseForward(source.shape, embedding, ids) for ids in learnt]
        self._dense = DenseForward(source.shape, embedding, held_out)
        self._split = DenseForward(source.shape, embedding, held_out)
        self._held_out = held_out

    def __call__(self, index: int) -> dict[str, Tensor]:
        weights = self._source.layer(index)
        inputs = torch.cat([forward.step(weights)[SKIPPED_TOKENS:] for forward in self._calibration])
        gate, up, down = (weights[f"mlp.{name}.weight"] for name in FFN)
        generator = torch.Generator().manual_seed(index)
        split = split_neurons(inputs, gate.float(), up.float(), down.float(), self._experts, generator=generator)
        self._dense.step(weights)
        states = self._split.attend(weights)
        self._split.add(run_split(states, gate.float(), up.float(), down.float(), split, self._top_k))
        kept = {name: weight for name, weight in weights.items() if not name.startswith("mlp.")}
        return kept | _tensors(split, gate, up, down)

    def quality(self) -> Quality:
        """Return the quality of the whole model. The caller has taken all layers."""
        dense, split = (
            math.exp(-log_likelihood(forward.hidden, self._held_out, self._source).mean().item())
            for forward in (self._dense, self._split)
        )
        return Quality("Python's documentation, topics not learnt from", len(self._held_out), dense, split)


@torch.inference_mode()
def log_likelihood(hidden: Tensor, token_ids: Tensor, source: GgufSource) -> Tensor:
    """Return the log-likelihood of every token but the first, given the tokens before it: [tokens - 1] float32.

    hidden: [tokens, hidden_size] float32, after the last layer.
    """
    states = rms_norm(hidden[:-1], source.final_norm().float(), source.shape.rms_norm_eps)
    embedding = source.embedding().float()
    parts = [
        linear(part, embedding).log_softmax(-1).gather(-1, targets)[:, 0]
        for part, targets in zip(
            torch.split(states, _ROWS_AT_ONCE), torch.split(token_ids[1:, None], _ROWS_AT_ONCE), strict=True
        )
    ]
    return torch.cat(parts)


@torch.inference_mode()
def run_split(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, split: NeuronSplit, top_k: int) -> Tensor:
    """Return the output of the split FFN: the dense FFN without the neurons of experts that are not chosen.

    x: [tokens, hidden]; gate, up: [I, hidden]; down: [hidden, I]; all float32.
    """
    chosen = linear(x, split.gate, split.bias).topk(top_k, -1).indices
    runs = torch.zeros(len(x), len(gate))
    runs[:, split.shared] = 1
    active = torch.zeros(len(x), len(split.experts)).scatter_(-1, chosen, 1.0)
    for expert, neurons in enumerate(split.experts):
        runs[:, neurons] = active[:, expert : expert + 1]
    return linear(silu(linear(x, gate)) * linear(x, up) * runs, down)


def _tensors(split: NeuronSplit, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    tensors = {"mlp.gate.weight": split.gate, "mlp.gate.bias": split.bias.contiguous()}
    for name, neurons in _parts(split):
        tensors |= {
            f"mlp.{name}.gate_proj.weight": gate[neurons].contiguous(),
            f"mlp.{name}.up_proj.weight": up[neurons].contiguous(),
            f"mlp.{name}.down_proj.weight": down[:, neurons].contiguous(),
        }
    return tensors


def _parts(split: NeuronSplit) -> Iterator[tuple[str, Tensor]]:
    yield "shared_experts", split.shared
    for expert, neurons in enumerate(split.experts):
        yield f"experts.{expert}", neurons


def _texts(source: GgufSource) -> tuple[list[Tensor], Tensor]:
    """Return token ids of two texts of different kinds to learn from, and of another text to judge by."""
    from pydoc_data.topics import topics

    encode = build_tokenizer(source.vocabulary).encode
    names = sorted(topics)
    documents = ["\n\n".join(topics[name] for name in names[parity::2]) for parity in (0, 1)]
    learnt = [torch.tensor(encode(text).ids[:CALIBRATION_TOKENS]) for text in (calibration_text(), documents[0])]
    return learnt, torch.tensor(encode(documents[1]).ids[:_HELD_OUT_TOKENS])


@dataclass(frozen=True)
class NeuronSplit:
    """shared: neurons that always run. experts: the neurons of each. gate, bias: [E, hidden] and [E] float32.

    The gate is a ridge regression from the FFN's input to the size of what each expert adds.
    """

    shared: Tensor
    experts: tuple[Tensor, ...]
    gate: Tensor
    bias: Tensor


def num_shared(intermediate_size: int, experts: int) -> int:
    """Return how many neurons always run: two thirds, and the rest of the last third when it is shared out evenly.

    Raise ValueError if there are more experts than neurons to share out.
    """
    each = intermediate_size // 3 // experts
    if each < 1:
        raise ValueError(f"{experts} experts cannot share a third of {intermediate_size} neurons")
    return intermediate_size - each * experts


@torch.inference_mode()
def split_neurons(
    ffn_inputs: Tensor, gate: Tensor, up: Tensor, down: Tensor, experts: int, *, generator: torch.Generator
) -> NeuronSplit:
    """ffn_inputs: [tokens, hidden]; gate, up: [I, hidden]; down: [hidden, I]; all float32."""
    inner = silu(linear(ffn_inputs, gate)) * linear(ffn_inputs, up)
    activity = inner.abs() * down.norm(dim=0)
    shared_count = num_shared(len(gate), experts)
    by_activity = activity.mean(0).argsort(descending=True)
    shared, rest = by_activity[:shared_count].sort().values, by_activity[shared_count:].sort().values
    together = activity[:, rest] / activity[:, rest].mean(0).clamp_min(1e-12)
    cluster = _balanced_clusters(normalize(together, dim=0).T, experts, generator)
    members = tuple(rest[cluster == expert] for expert in range(experts))
    added = torch.stack([linear(inner[:, part], down[:, part]).norm(dim=-1) for part in members], -1)
    mean = ffn_inputs.mean(0)
    centred = ffn_inputs - mean
    damping = _RIDGE * len(centred) * centred.square().mean()
    weight = torch.linalg.solve(
        centred.T @ centred + damping * torch.eye(centred.shape[1]), centred.T @ (added - added.mean(0))
    )
    return NeuronSplit(shared, members, weight.T.contiguous(), added.mean(0) - mean @ weight)


def _balanced_clusters(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Return the cluster of each point, [N]; all are equally large. points: [N, D]; N divides by `clusters`."""
    points = points - points.mean(0)
    centroids = _apart(normalize(points, dim=-1), clusters, generator)
    assigned = torch.empty(len(points), dtype=torch.int64)
    for _ in range(_ITERATIONS):
        nearness = points @ normalize(centroids, dim=-1).T
        assigned = _share_out(nearness)
        centroids = torch.stack([points[assigned == cluster].mean(0) for cluster in range(clusters)])
    return assigned


def _apart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Take a random point, then each time the one least like all taken before. points: [N, D] of length 1."""
    taken = [int(torch.randint(len(points), (1,), generator=generator))]
    likeness = points @ points[taken[0]]
    for _ in range(count - 1):
        taken.append(int(likeness.argmin()))
        likeness = torch.maximum(likeness, points @ points[taken[-1]])
    return points[taken]


def _share_out(nearness: Tensor) -> Tensor:
    """Assign the nearest pairs of point and cluster first, until a cluster is full. nearness: [N, clusters]."""
    num_points, clusters = nearness.shape
    room = [num_points // clusters] * clusters
    assigned = [-1] * num_points
    for pair in nearness.flatten().argsort(descending=True).tolist():
        point, cluster = divmod(pair, clusters)
        if assigned[point] < 0 and room[cluster]:
            assigned[point] = cluster
            room[cluster] -= 1
    return torch.tensor(assigned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], build_split))
