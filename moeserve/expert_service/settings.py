"""Settings of the expert memory that contradict each other, found before anything is started."""

from __future__ import annotations

from experts.prediction.choice import source_names
from moeserve.config import ConfigError, ServeConfig


def check_expert_memory(config: ServeConfig) -> None:
    """Raises ConfigError."""
    if config.expert_policy == "static" and config.expert_statistics is None:
        raise ConfigError("--expert-policy static needs --expert-statistics with a file to learn from.")
    if config.expert_peer_memory is not None and config.nnodes > 1:
        raise ConfigError("--expert-peer-memory works between ranks of one machine, not with --nnodes.")
    if config.expert_prefetch in ("off", "auto", "gate", "fitted"):
        if config.expert_policy == "affinity":
            raise ConfigError("--expert-policy affinity goes by what predictors learn: name some in --expert-prefetch.")
        return
    try:
        source_names(config.expert_prefetch)
    except ValueError as error:
        raise ConfigError(f"--expert-prefetch: {error}.") from None
