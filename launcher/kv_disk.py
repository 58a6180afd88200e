"""Where a service keeps KV on disk that was told nothing about it: in this user's cache folder, on loopback alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace

from launcher.preflight import is_loopback
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.kv.disk.files import AUTO, disk_root, open_root, scan
from moeserve.settings.quantities import show_size

_NONE = "none"  # --kv-disk-path none: no KV on disk
_BYTES = 10 * 10**9  # at most, without --kv-disk-size
_LEAST_BYTES = 256 * 10**6  # fewer would hold no agent's prompt


def with_kv_disk(config: ServeConfig, notice: Callable[[str], None]) -> ServeConfig:
    """Return settings whose --kv-disk-path is decided: None, a folder that the user names, or `auto`.

    A folder of the cache that cannot be used is told by `notice`, and there is no KV on disk then.
    """
    if config.kv_disk_path == _NONE:
        return without_none(config)
    if config.kv_disk_path is not None and config.kv_disk_path != AUTO:
        return config
    if config.kv_disk_path is None and not _suits(config):
        return config
    try:
        root = disk_root(AUTO)
        open_root(root)
        free = shutil.disk_usage(root).free
        # KV that is there already counts as room, and the other half of the disk is left to others.
        used = 0 if free > 2 * _BYTES else sum(block.num_bytes for block in scan(root, time.time()))
    except (OSError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or error
        notice(f"No KV is kept on disk, its folder cannot be used ({reason}); --kv-disk-path DIR names another one.")
        return replace(config, kv_disk_path=None)
    is_given = config.kv_disk_size != ServeConfig.kv_disk_size
    size = config.kv_disk_size if is_given else min(_BYTES, (free + used) // 2)
    if size < _LEAST_BYTES and not is_given:
        notice(f"No KV is kept on disk: only {show_size(free)} are free at {root}.")
        return replace(config, kv_disk_path=None)
    return replace(config, kv_disk_path=AUTO, kv_disk_size=size)


def without_none(config: ServeConfig) -> ServeConfig:
    """Return settings without a --kv-disk-path where the user says `none`."""
    return replace(config, kv_disk_path=None) if config.kv_disk_path == _NONE else config


def said_of_disk(config: ServeConfig) -> str | None:
    """Say where KV is kept on disk, and how much; None without any."""
    if config.kv_disk_path is None:
        return None
    off = "; --kv-disk-path none keeps none" if config.kv_disk_path == AUTO else ""
    return f"KV is kept in {disk_root(config.kv_disk_path)}, at most {show_size(config.kv_disk_size)}{off}"


def _suits(config: ServeConfig) -> bool:
    """Return whether KV on disk is of use to a service, and nobody but this user's programs reaches it."""
    moves = config.expert_parallel_size > 1 and config.rebalance_interval > 0
    return (
        is_loopback(config.host)
        and config.enable_prefix_caching
        and config.device != "cuda"
        and config.kv_host_memory is None
        and config.nnodes == 1
        and not moves
    )
