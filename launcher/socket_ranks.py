"""`--device auto` starts a rank on each of several NUMA nodes of a CPU; the ranks share the layers.

A single process reads half of its weights across the link between two sockets. Ranks keep to the cores of their nodes
(`moeserve.engine.ranks.cores`), and so to their memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launcher.preflight import check_settings
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.ranks.settings import layers_of_ranks
from moeserve.model.families import build_spec, is_native, load_config, read_config
from moeserve.model.spec import ModelError
from moeserve.model.stages import Stage


def rank_per_node(config: ServeConfig, folder: Path, num_nodes: int) -> ServeConfig:
    """Return settings with a rank on each NUMA node, or `config` where a single process is to serve.

    So it is where settings name ranks, cores or threads, or what ranks that share layers cannot do, and for models
    whose layers are not shared.
    """
    if num_nodes < 2 or config.num_ranks > 1 or config.nnodes > 1 or config.threads or not config.bind_cores:
        return config
    shared = replace(config, pipeline_parallel_size=num_nodes)
    try:
        check_settings(shared)
        if not is_native(read_config(folder), config.model_impl):
            return config
        spec = build_spec(load_config(folder))
        spec.of_layers(Stage(0, spec.num_layers, spec.num_layers))
        layers_of_ranks(shared, [1] * spec.num_layers, spec.joined_layers)
        return shared
    except (ConfigError, ModelError):
        return config
