"""By what the experts of a service are decided, for operators."""

from __future__ import annotations

from typing import Any, Protocol

from moeserve.config import ServeConfig


class Prefetching(Protocol):
    """Whoever loads ahead (`experts.prefetch.prefetcher.LayerListener`)."""

    @property
    def is_on(self) -> bool: ...


def expert_strategy(
    config: ServeConfig, prefetcher: Prefetching | None, dispatch: str | None = None, *, all_fit: bool = False
) -> dict[str, Any]:
    """prefetcher: None where nothing is loaded ahead. dispatch: the shape that is used, None of one rank.

    all_fit: the memory that the settings give holds all experts, so that nothing is evicted.
    """
    told: dict[str, Any] = {}
    if config.expert_memory is not None and not all_fit:
        told["eviction"] = config.expert_policy
        told["prefetch"] = {
            "source": "off" if prefetcher is None else config.expert_prefetch,
            "is_on": prefetcher is not None and prefetcher.is_on,
        }
    if dispatch is not None:
        told["placement"] = config.placement
        told["dispatch"] = dispatch
    return told
