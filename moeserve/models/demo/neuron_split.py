"""Neuron splits: a dense FFN whose neurons are shared out to experts by what they are active together for.

The neurons that matter most on average always run; the rest form experts of equal size by balanced k-means over
their activity, after MoEfication (arXiv 2110.01786). Experts do not come in groups. The output is the plain sum of
the chosen experts, so all experts together are the dense FFN. The gate is a ridge regression from the FFN's input to
the size of what each expert adds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize, silu

_ITERATIONS = 6
_RIDGE = 0.01


@dataclass(frozen=True)
class NeuronSplit:
    """shared: neurons that always run. experts: each expert's neurons. gate, bias: [E, hidden] and [E] float32."""

    shared: Tensor
    experts: tuple[Tensor, ...]
    gate: Tensor
    bias: Tensor


def num_shared(intermediate_size: int, experts: int) -> int:
    """How many neurons always run: two thirds, and what of the last third cannot be shared out evenly.

    ValueError if there are more experts than neurons to share out.
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
    """[points]: the cluster of each, all equally large. points: [N, D]; N divides by `clusters`."""
    points = points - points.mean(0)
    centroids = _apart(normalize(points, dim=-1), clusters, generator)
    assigned = torch.empty(len(points), dtype=torch.int64)
    for _ in range(_ITERATIONS):
        nearness = points @ normalize(centroids, dim=-1).T
        assigned = _share_out(nearness)
        centroids = torch.stack([points[assigned == cluster].mean(0) for cluster in range(clusters)])
    return assigned


def _apart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A random point, then each time the one that is least like those taken. points: [N, D] of length 1."""
    taken = [int(torch.randint(len(points), (1,), generator=generator))]
    likeness = points @ points[taken[0]]
    for _ in range(count - 1):
        taken.append(int(likeness.argmin()))
        likeness = torch.maximum(likeness, points @ points[taken[-1]])
    return points[taken]


def _share_out(nearness: Tensor) -> Tensor:
    """The nearest pairs of point and cluster first, until a cluster is full. nearness: [N, clusters]."""
    num_points, clusters = nearness.shape
    room = [num_points // clusters] * clusters
    assigned = [-1] * num_points
    for pair in nearness.flatten().argsort(descending=True).tolist():
        point, cluster = divmod(pair, clusters)
        if assigned[point] < 0 and room[cluster]:
            assigned[point] = cluster
            room[cluster] -= 1
    return torch.tensor(assigned)
