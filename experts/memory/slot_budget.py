"""How the slots that a fast tier pays for are shared out among the layers. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def least_slots(num_held: Sequence[int], top_k: int) -> list[int]:
    """Of each layer: room for the experts that one token may choose here. num_held: experts that the rank serves."""
    return [min(top_k, held) for held in num_held]


def share_slots(count: int, num_held: Sequence[int], top_k: int) -> tuple[int, ...] | None:
    """`count` slots over layers, as even as can be, none with more than the experts it holds; None if all fit.

    ValueError if there are fewer than `least_slots`.
    """
    if count >= sum(num_held):
        return None
    slots = least_slots(num_held, top_k)
    left = count - sum(slots)
    if left < 0:
        raise ValueError(f"{count} slots, but at least {sum(slots)} are needed")
    while left:
        for layer in _smallest(slots, num_held)[:left]:
            slots[layer] += 1
            left -= 1
    return tuple(slots)


def _smallest(slots: Sequence[int], num_held: Sequence[int]) -> list[int]:
    """The layers with the fewest slots among those that can use one more."""
    open_layers = [layer for layer, held in enumerate(num_held) if slots[layer] < held]
    fewest = min(slots[layer] for layer in open_layers)
    return [layer for layer in open_layers if slots[layer] == fewest]
