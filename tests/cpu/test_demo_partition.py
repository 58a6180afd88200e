"""Tied partitions compute the dense feed-forward network, with experts that differ and routing that follows tokens."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from moeserve.model.demo_build import TiedExperts, check_partition, gate_centroids, split_ffn

HIDDEN, NEURONS, TOKENS = 32, 48, 200


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def dense() -> tuple[Tensor, Tensor, Tensor]:
    """gate, up [NEURONS, HIDDEN] and down [HIDDEN, NEURONS] in bfloat16, as the demo's are."""
    g = generator(1)
    gate, up, down = (torch.randn(NEURONS, HIDDEN, generator=g) * 0.3 for _ in range(3))
    return gate.bfloat16(), up.bfloat16(), down.T.contiguous().bfloat16()


@pytest.fixture
def tokens() -> Tensor:
    """FFN inputs [TOKENS, HIDDEN] of five kinds of token around a common mean."""
    g = generator(2)
    kinds = torch.randn(5, HIDDEN, generator=g) * 2
    chosen = torch.randint(5, (TOKENS,), generator=g)
    return 3.0 + kinds[chosen] + torch.randn(TOKENS, HIDDEN, generator=g)


def ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (silu(x @ gate.double().T) * (x @ up.double().T)) @ down.double().T


def route(x: Tensor, tied: TiedExperts, top_k: int) -> tuple[Tensor, Tensor]:
    """Mixtral's gate: softmax over all experts, the best k, renormalised."""
    weights, chosen = (x @ tied.moe_gate.double().T).softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), chosen


def mixture(x: Tensor, tied: TiedExperts, top_k: int) -> Tensor:
    weights, chosen = route(x, tied, top_k)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, e in zip(weights[row], chosen[row].tolist(), strict=True):
            out[row] += weight * ffn(x[row], tied.gate[e], tied.up[e], tied.down[e])
    return out


def split(dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor, experts: int, top_k: int) -> TiedExperts:
    centroids = gate_centroids(tokens, experts // top_k, generator=generator())
    return split_ffn(*dense, centroids, top_k=top_k, generator=generator())


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 4), (8, 1), (2, 2), (16, 2)])
def test_the_mixture_computes_the_dense_network(
    dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor, experts: int, top_k: int
) -> None:
    x = tokens.double()
    tied = split(dense, tokens, experts, top_k)
    torch.testing.assert_close(mixture(x, tied, top_k), ffn(x, *dense), rtol=1e-9, atol=1e-9)


def test_the_chosen_experts_are_one_whole_group_with_equal_weights(
    dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor
) -> None:
    weights, chosen = route(tokens.double(), split(dense, tokens, 8, 2), 2)
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    assert torch.equal(chosen[:, 0] % 4, chosen[:, 1] % 4)
    assert (chosen[:, 0] != chosen[:, 1]).all()


def test_all_experts_differ(dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> None:
    tied = split(dense, tokens, 8, 2)
    for weights in (tied.gate, tied.up, tied.down):
        assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_a_wrong_expert_changes_the_output(dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> None:
    x = tokens[:8].double()
    tied = split(dense, tokens, 8, 2)
    swapped = TiedExperts(tied.moe_gate, *((w[1], w[0], *w[2:]) for w in (tied.gate, tied.up, tied.down)))
    hit = ((route(x, tied, 2)[1] % 4) < 2).any(-1)
    changed = (mixture(x, swapped, 2) - ffn(x, *dense)).abs().amax(-1) > 0.01
    assert hit.any()
    assert torch.equal(changed, hit)


def test_routing_follows_the_kind_of_token(dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> None:
    groups = route(tokens.double(), split(dense, tokens, 8, 2), 2)[1][:, 0] % 4
    assert set(groups.tolist()) == {0, 1, 2, 3}


def test_centroids_are_unit_vectors_that_ignore_the_mean(tokens: Tensor) -> None:
    centroids = gate_centroids(tokens, 4, generator=generator())
    torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(centroids @ tokens.mean(0), torch.zeros(4), rtol=0, atol=1e-4)


def test_a_cluster_without_members_is_seeded_again() -> None:
    same = torch.ones(10, HIDDEN) + torch.eye(10, HIDDEN)[:1].repeat(10, 1)
    points = torch.cat((same, torch.randn(3, HIDDEN, generator=generator(3))))
    centroids = gate_centroids(points, 6, generator=generator())
    assert centroids.shape == (6, HIDDEN)
    assert torch.isfinite(centroids).all()


def test_the_split_is_the_same_every_time(dense: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> None:
    first, second = split(dense, tokens, 8, 2), split(dense, tokens, 8, 2)
    for field in fields(TiedExperts):
        for a, b in zip(getattr(first, field.name), getattr(second, field.name), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("neurons", "experts", "top_k", "words"),
    [(48, 6, 3, "power of two"), (48, 8, 0, "power of two"), (48, 7, 2, "multiple"), (49, 8, 2, "do not divide")],
)
def test_a_split_that_would_not_be_exact_is_refused(neurons: int, experts: int, top_k: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_partition(neurons, experts, top_k)
