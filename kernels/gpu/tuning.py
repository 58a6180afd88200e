"""Measured configurations of kernels: files keyed by GPU, shape, weight format and Triton version. Pure.

A file says what was fastest on one GPU with one Triton for one shape, for some numbers of tokens. Such files come with
the package (`kernels/gpu/tuned`) and from `moeserve tune`. Where none fits, the heuristic serves, and the log says so.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kernels.gpu.moe_config import (
    MAX_PAIRS_AT_ONCE,
    Device,
    MoeConfig,
    MoeShape,
    allows_persistent,
    fits,
    heuristic_config,
)

PACKAGED = Path(__file__).parent / "tuned"

Key = TypeVar("Key")
Config = TypeVar("Config")

_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Platform:
    """gpu: the device's name as its driver gives it. triton: its version, of which major and minor count."""

    gpu: str
    triton: str


class TuningError(Exception):
    """A tuned file cannot be used. The message says which and why."""


class Named(Protocol):
    """A shape that kernels are tuned for."""

    def name(self) -> str: ...


def file_name(shape: Named, platform: Platform) -> str:
    gpu = re.sub(r"[^a-z0-9]+", "-", platform.gpu.lower()).strip("-")
    return f"{shape.name()}--{gpu}--triton-{_minor(platform.triton)}.json"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def write_tuned(
    path: Path,
    shape: MoeShape,
    platform: Platform,
    configs: Mapping[int, MoeConfig],
    microseconds: Mapping[int, float],
) -> None:
    """Writes the fastest configuration and its time per number of tokens. Raises OSError."""
    entries = {
        str(tokens): {"microseconds": round(microseconds[tokens], 1), **config.to_dict()}
        for tokens, config in sorted(configs.items())
    }
    write_entries(path, shape, platform, entries)


def write_entries(path: Path, shape: Named, platform: Platform, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a tuned file. Raises OSError."""
    fields = {
        "format": _FORMAT,
        "shape": shape.name(),
        "gpu": platform.gpu,
        "triton": platform.triton,
        "configs": configs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=1) + "\n")


def read_tuned(path: Path, shape: MoeShape, platform: Platform, device: Device) -> dict[int, MoeConfig]:
    """Configurations by number of tokens, at least one. Raises TuningError for a broken file or one for others."""
    configs = read_entries(path, shape, platform, lambda tokens, config: (int(tokens), MoeConfig.from_dict(config)))
    if not configs or not all(_runs(config, shape, device) for config in configs.values()):
        raise TuningError(f"{path} has configurations that cannot run here")
    return configs


def read_entries(
    path: Path, shape: Named, platform: Platform, parse: Callable[[str, dict[str, Any]], tuple[Key, Config]]
) -> dict[Key, Config]:
    """What `parse` makes of each name and its fields, but for the time. Raises TuningError as `read_tuned` does."""
    try:
        fields = json.loads(path.read_text())
        found = (fields["format"], fields["shape"], fields["gpu"], _minor(fields["triton"]))
        configs = dict(
            parse(name, {field: value for field, value in entry.items() if field != "microseconds"})
            for name, entry in fields["configs"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(f"{path} is no file of tuned configurations ({error!r})") from error
    wanted = (_FORMAT, shape.name(), platform.gpu, _minor(platform.triton))
    if found != wanted:
        raise TuningError(f"{path} is for {found}, not for {wanted}")
    return configs


def _runs(config: MoeConfig, shape: MoeShape, device: Device) -> bool:
    tiles = (config.gate_up, config.down)
    if any(not _is_power_of_two(size) for tile in tiles for size in (tile.block_n, tile.block_k, tile.num_warps)):
        return False
    if config.variant in ("gemv", "gemv_split"):
        return shape.weights != "int4" or all(tile.block_k == shape.group_size for tile in tiles)
    if config.variant == "persistent" and not allows_persistent(shape, device):
        return False
    return (
        config.block_m in (16, 32, 64, 128)
        and fits(config.gate_up, config.block_m, "gate_up", shape, device)
        and fits(config.down, config.block_m, "down", shape, device)
    )


def _is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def nearest(num_tokens: int, tuned: Mapping[int, MoeConfig]) -> MoeConfig:
    """The configuration of the nearest number of tokens, by ratio; of two as near the larger's."""
    return tuned[min(tuned, key=lambda tokens: (abs(math.log(tokens / num_tokens)), -tokens))]


class MoeConfigs:
    """Chooses a layer's configuration by number of tokens: a measured one if there is one, else the heuristic's.

    shape: of the layer. folders: where tuned files may lie, first come first served; they are looked at when first
    needed. What is used is logged then, once.
    """

    def __init__(
        self, shape: MoeShape, device: Device, platform: Platform, folders: Sequence[Path] = (PACKAGED,)
    ) -> None:
        self.shape = shape
        self._device = device
        self._platform = platform
        self._folders = folders
        self._tuned: dict[int, MoeConfig] | None = None
        self._chosen: dict[int, MoeConfig] = {}

    def __call__(self, num_tokens: int) -> MoeConfig:
        """num_tokens: at least 1. Raises ValueError where nothing fits the device."""
        config = self._chosen.get(num_tokens)
        if config is None:
            if self._tuned is None:
                self._tuned = self._read()
            if self._tuned:
                config = nearest(num_tokens, self._tuned)
            else:
                config = heuristic_config(self.shape, num_tokens, self._device)
            self._chosen[num_tokens] = config
        return config

    def variant(self, num_tokens: int) -> tuple[MoeConfig, bool]:
        """What kernels are compiled for: the configuration, and whether rows are counted in a launch of their own.

        Numbers of tokens with the same one launch the same kernels.
        """
        return self(num_tokens), num_tokens * self.shape.top_k > MAX_PAIRS_AT_ONCE

    def _read(self) -> dict[int, MoeConfig]:
        def read(path: Path) -> dict[int, MoeConfig]:
            return read_tuned(path, self.shape, self._platform, self._device)

        return first_file(self._folders, self.shape, self._platform, read) or {}


def first_file(
    folders: Sequence[Path], shape: Named, platform: Platform, read: Callable[[Path], Config]
) -> Config | None:
    """What `read` gives for the first of the folders' files that it does not refuse; the log says which, or none."""
    for folder in folders:
        path = folder / file_name(shape, platform)
        if not path.exists():
            continue
        try:
            tuned = read(path)
        except TuningError as error:
            _log.warning("%s; looking further", error)
            continue
        _log.info("%s runs with the tuned configurations of %s", shape.name(), path)
        return tuned
    _log.warning(
        "%s runs with untuned configurations on %s with Triton %s: `moeserve tune` measures better ones",
        shape.name(),
        platform.gpu,
        platform.triton,
    )
    return None
