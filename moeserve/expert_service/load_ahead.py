"""A service's prefetching as its settings and the gates fitted to its model say, told to the log."""

from __future__ import annotations

from pathlib import Path

import structlog

from experts.prefetch.home_rows import HomeRows
from experts.prefetch.prefix_listener import PrefixListener
from moeserve.expert_service.fitted_gates import find_fitted_gates
from moeserve.expert_service.prefetch import GatedDecoder, ResidentLayers, start_prefetching

log = structlog.get_logger(__name__)


def load_ahead(
    directory: Path,
    choice: str,
    experts: ResidentLayers,
    decoder: GatedDecoder,
    home_rows: HomeRows | None = None,
) -> PrefixListener | None:
    """`start_prefetching` for the checkpoint in `directory`. What was loaded before does not count.

    Raises ConfigError for a choice that needs fitted gates where there are none.
    """
    experts.memory.forget_counts()
    fitted = find_fitted_gates(directory)
    listener = start_prefetching(choice, experts, decoder, home_rows, fitted)
    if listener is not None:
        log.info("expert_prefetch", by=choice, gates_fitted=fitted is not None and choice != "gate")
    elif choice != "off":
        log.info("no_expert_prefetch", reason="the model has one layer with experts: no gate comes after it")
    return listener
