"""Tied partitions: a dense FFN rewritten as a mixture of experts that computes exactly the same function.

The experts form G = E / k groups. Each group is a random partition of the FFN's neurons into k slices, one slice per
expert, so the k experts of a group together are the whole FFN. They share one row of the gate, so the top k experts
are always one whole group, each with weight exactly 1 / k; `down` times k undoes that weight. Which group is chosen
depends on the token: rows are k-means centroids of FFN inputs. Every expert's weights differ from every other's, so
a token sent to a wrong expert changes the text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True)
class TiedExperts:
    """One layer's gate [E, hidden] and per-expert `gate`/`up` [I/k, hidden] and `down` [hidden, I/k] projections."""

    moe_gate: Tensor
    gate: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]


def check_partition(intermediate_size: int, experts: int, top_k: int) -> None:
    """Raise ValueError unless the FFN can be split exactly into `experts` tied experts of which `top_k` act."""
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


def gate_centroids(ffn_inputs: Tensor, groups: int, *, generator: torch.Generator, iterations: int = 16) -> Tensor:
    """Directions [groups, hidden] that tell the kinds of tokens in `ffn_inputs` [tokens, hidden] float32 apart.

    Spherical k-means of the centred inputs. The gate sees inputs that are not centred and has no bias, so the mean's
    direction is projected out of the centroids: the choice then hangs on what differs between tokens, and the scores
    of different groups lie far apart relative to their size, which keeps ties rare in low precision.
    """
    mean = ffn_inputs.mean(0)
    points = normalize(ffn_inputs - mean, dim=-1)
    centroids = points[torch.randperm(len(points), generator=generator)[:groups]]
    for _ in range(iterations):
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
