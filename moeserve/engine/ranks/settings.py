"""The settings of ranks that share a model's layers, or each of its layers: check them, and split the layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from moeserve.config import ConfigError, ServeConfig
from moeserve.model.spec import DecoderSpec
from moeserve.model.stages import split_layers
from moeserve.settings.drafts import parse_speculative
from moeserve.settings.layers import parse_layers

# Settings that do not go together with `--pipeline-parallel-size`, each with the reason, a clause.
_WITHOUT_PIPELINE = {
    "rebalance_interval": "experts move between ranks that have all layers so far",
    "expert_memory": "every rank keeps the experts of its layers in memory",
    "expert_store_dir": "every rank keeps the experts of its layers in memory",
    "kv_transfer_config": "a block of keys and values lies in parts on all ranks",
}
# Settings that do not go together with `--tensor-parallel-size`, each with the reason, a clause.
_WITHOUT_SHARDS = {
    "num_redundant_experts": "which replica serves a row would go by the group of ranks that has it",
    "rebalance_interval": "experts stay where they are",
    "kv_transfer_config": "a block of keys and values lies in parts on all ranks",
}


def check_tensor(config: ServeConfig) -> None:
    """Raise ConfigError for settings that do not go together with shards of every layer on several ranks."""
    if config.tensor_parallel_size == 1:
        return
    _refuse(config, _WITHOUT_SHARDS, "--tensor-parallel-size")
    if config.device == "cuda" and config.expert_parallel_size * config.pipeline_parallel_size > 1:
        other = "expert" if config.expert_parallel_size > 1 else "pipeline"
        raise ConfigError(f"--tensor-parallel-size with --{other}-parallel-size is for CPUs so far.")
    if config.expert_parallel_size > 1 and config.pipeline_parallel_size > 1:
        raise ConfigError("--tensor-parallel-size goes together with one of the other two ways at a time.")
    if parse_speculative(config.speculative_config).method == "mtp":
        raise ConfigError(
            "--speculative-config mtp does not go together with --tensor-parallel-size: the layer that drafts is whole."
        )


def check_pipeline(config: ServeConfig) -> None:
    """Raise ConfigError for settings that do not go together with layers on several ranks."""
    if config.pipeline_parallel_size == 1:
        if config.layers_per_rank is not None:
            raise ConfigError(f"--layers-per-rank {config.layers_per_rank} needs --pipeline-parallel-size.")
        return
    _refuse(config, _WITHOUT_PIPELINE, "--pipeline-parallel-size")
    if config.num_ranks > config.pipeline_parallel_size and config.pipeline_parallel_size % config.nnodes:
        raise ConfigError(
            f"--pipeline-parallel-size {config.pipeline_parallel_size}: {config.nnodes} nodes cannot have equally many "
            "of its stages, and the ranks of a stage are on one node."
        )
    if config.device == "cuda" and config.expert_parallel_size > 1:
        raise ConfigError("--pipeline-parallel-size with --expert-parallel-size is for CPUs so far.")
    if parse_speculative(config.speculative_config).method == "mtp":
        raise ConfigError(
            "--speculative-config mtp does not go together with --pipeline-parallel-size: the layer that drafts needs "
            "the embedding, which is on the first rank, and the last states, which are on the last one."
        )


def check_first_node(part: DecoderSpec, whole: DecoderSpec) -> None:
    """Raise ConfigError unless `part`, the layers of node 0, tells how to divide memory between what `whole` needs."""
    if not part.kv_layers or bool(part.state_layers) != bool(whole.state_layers):
        needed = "one with attention" + (" and one with recurrent states" if whole.state_layers else "")
        raise ConfigError(
            f"--pipeline-parallel-size: of the layers on node 0, {part.num_layers}, there has to be {needed}: choose "
            "other --layers-per-rank."
        )


def layers_of_ranks(config: ServeConfig, sizes: Sequence[int], joined: Collection[int] = ()) -> tuple[int, ...]:
    """Return how many layers each rank holds: as the settings say, else by their `sizes`. See `split_layers`.

    Raise ConfigError if the settings do not fit the number of layers.
    """
    num_ranks, num_layers, num_firsts = config.pipeline_parallel_size, len(sizes), len(sizes) - len(joined)
    if num_ranks > num_firsts:
        parts = f"{num_firsts} parts of the layers that ranks can share" if joined else f"{num_layers} layers"
        raise ConfigError(f"--pipeline-parallel-size {num_ranks} is more than the {parts} of the model.")
    if config.layers_per_rank is None:
        return split_layers(sizes, num_ranks, joined)
    counts = parse_layers(config.layers_per_rank)
    if len(counts) != num_ranks or sum(counts) != num_layers:
        raise ConfigError(
            f"--layers-per-rank {config.layers_per_rank} is not {num_ranks} numbers that add up to the {num_layers} "
            "layers of the model."
        )
    return counts


def _refuse(config: ServeConfig, reasons: Mapping[str, str], beside: str) -> None:
    """Raise ConfigError for a setting that is not at its default. reasons: by setting. beside: a flag."""
    for name, reason in reasons.items():
        if getattr(config, name) != getattr(ServeConfig, name):
            raise ConfigError(f"--{name.replace('_', '-')} does not go together with {beside}: {reason}.")
