"""The device that serves, its memory, and the number of KV blocks that the memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from kernels.cpu.library import CPU_KERNELS, REPRODUCIBLE, computes_in_tiles
from moeserve.config import ConfigError, ServeConfig, refuse_changed
from moeserve.gpu_faults import (
    another_gpu,
    cuda_is_available,
    lacks_kernels,
    no_device,
    reason_of,
    triton_absence,
    without_warnings,
)
from moeserve.settings.quantities import show_size
from radix_cache import least_window_blocks

if TYPE_CHECKING:
    import torch

# Settings that only a GPU honours.
_OF_A_GPU = ("gpu_memory_utilization", "enforce_eager", "expert_compute")
# The memory of graphs where none has been captured, an estimate: the allocations of a decode step, once for all sizes,
# and the driver's copies of nodes.
GRAPH_BYTES = 512 * 2**20
# Of a GPU that `launcher/gpus.json` does not know: a prompt's chunk costs it hardly more than a decode step, since both
# read all experts.
_USUAL_TOKENS = {"cpu": 256, "cuda": 4096}
# The products of a GPU's largest step take so many times as long as reading the weights, which fill so much of it.
_TIMES_THE_READING, _SHARE_OF_WEIGHTS = 4, 0.6
# A token of Qwen3-30B-A3B has 3.3 billion weights; products attain about half of what the makers give.
_FLOPS_PER_TOKEN, _ATTAINED = 2 * 3.3e9, 0.5
# The least and the most tokens that this rule gives: twice the requests that run at once, and two of an H200's steps.
_LIMITS_ON_GPU = (512, 8192)
# Each of 128 experts, 8 for a token, gets 128 rows of so many tokens, which tiles (AMX) multiply at their rate. `Pace`
# cuts steps that would take too long for the requests beside them.
_TOKENS_IN_TILES = 2048

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 2**60  # version 1 of control groups writes a number of this order for no limit
_MEMINFO = Path("/proc/meminfo")
# Share of the memory beside weights and reserve that KV takes without a setting. Pages are taken when first written.
_KV_SHARE = 0.85
# Contexts of the model, for each request that may run at once, that KV holds at most without a setting.
_MOST_CONTEXTS = 4

# Recurrent states: the slots of running requests take at most this share of the same memory; snapshots without a
# setting take this share of the KV memory.
_SLOT_SHARE = 0.5
_SNAPSHOT_SHARE = 0.25
# Layers with a sliding window have one block of their own for several KV blocks. The ratio lets requests of this length
# that keep two windows each, of the prompt and of the answer, use up both kinds at the same time: longer requests use
# up the KV blocks first, shorter requests the window blocks.
_BALANCED_TOKENS = 4096
_BLOCKS_PER_WINDOW_BLOCK = (2, 4)
# The memory left free beside weights and KV.
RESERVE_BYTES = 512 * 2**20


class GpuFacts(Protocol):
    """The figures of a GPU that decide the size of its steps; see `moeserve.machine.Gpu`."""

    @property
    def total_bytes(self) -> int: ...

    @property
    def bandwidth(self) -> float | None: ...

    @property
    def flops(self) -> float | None: ...


def choose_device(config: ServeConfig, cuda_absence: Callable[[bool], str | None]) -> str:
    """Return `cpu` or `cuda`. Raise ConfigError where `--device cuda` cannot be used.

    `cuda_absence(needs_fp8)` returns why no GPU can be used here, None if one can; it is called only if needed. `auto`
    is the CPU: the launcher has asked for the GPU by then where it is to be used (`launcher.gpu_choice`).
    """
    if config.device != "cuda":
        return "cpu"
    obstacle = cuda_absence(needs_fp8(config)) or _unsupported(config)
    if obstacle is not None:
        raise ConfigError(f"--device cuda: {obstacle}.")
    return "cuda"


def refuse_gpu_settings(config: ServeConfig, needed: str) -> None:
    """Raise ConfigError if a setting that only a GPU honours is changed. needed: its requirement, in words."""
    refuse_changed(config, _OF_A_GPU, needed)
    if config.weight_forms.experts == "fp8":
        raise ConfigError(f"--quantization {config.quantization} needs {needed}.")
    if config.kv_cache_dtype == "fp8_e4m3":
        raise ConfigError(f"--kv-cache-dtype fp8_e4m3 needs {needed}.")


def needs_fp8(config: ServeConfig) -> bool:
    """Return whether kernels read fp8 e4m3."""
    return config.kv_cache_dtype == "fp8_e4m3" or config.weight_forms.experts == "fp8"


def cuda_absence(needs_fp8: bool) -> str | None:
    """Return why CUDA kernels cannot run in this process; None if they can."""
    import torch

    if torch.version.cuda is None:
        return "this build of torch has no CUDA; make venv TORCH=cuda installs one that has"
    if not cuda_is_available():
        return no_device()
    try:
        with without_warnings():
            capability = torch.cuda.get_device_capability()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        return f"torch cannot use the GPU: {reason_of(error)}"
    obstacle = incapability(capability, needs_fp8) or lacks_kernels(capability, torch.cuda.get_arch_list())
    return triton_absence() if obstacle is None else f"{obstacle}{another_gpu()}"


def current_gpu() -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def gpu_name() -> str:
    """Return the name of the product that `current_gpu` is."""
    import torch

    device = current_gpu()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def incapability(capability: tuple[int, int], needs_fp8: bool) -> str | None:
    """Return why a GPU of this compute capability cannot be used; None if it can."""
    major, minor = capability
    if capability < (8, 0):
        return f"compute capability {major}.{minor} is below 8.0"
    if needs_fp8 and capability < (8, 9):
        return f"compute capability {major}.{minor} is below 8.9, which fp8 needs"
    return None


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a GPU has products of fp8; an H200, as which Triton's interpreter counts, has them."""
    import torch

    return device.type != "cuda" or incapability(torch.cuda.get_device_capability(device), needs_fp8=True) is None


def _unsupported(config: ServeConfig) -> str | None:
    if config.dtype == "float32":
        for name in ("quantization", "kv_cache_dtype"):
            if getattr(config, name) != getattr(ServeConfig, name):
                return f"--{name.replace('_', '-')} is for 16 bits: use --dtype bfloat16 or float16"
    if config.kv_cache_dtype not in ("auto", "fp8_e4m3"):
        return f"--kv-cache-dtype {config.kv_cache_dtype} is for a CPU; a GPU has fp8_e4m3"
    if config.weight_forms.others != "none":
        return f"--quantization {config.quantization} is for a CPU; a GPU rounds experts alone, as experts=int4"
    if config.arithmetic == "int8":
        return "--arithmetic int8 is for a CPU"
    if config.reproducible:
        return "--reproducible is for a CPU"
    if config.block_size & (config.block_size - 1):
        return f"--block-size {config.block_size} is not a power of two"
    return None


def kernels_variable(config: ServeConfig) -> dict[str, str]:
    """Return the variable that has a process take the compiled kernels that the settings ask for."""
    return {CPU_KERNELS: REPRODUCIBLE} if config.reproducible else {}


def too_few_gpus(config: ServeConfig, num_gpus: int) -> str | None:
    """Return why each rank of a node does not find a GPU of its own; None if it does."""
    num_here = config.num_ranks_here
    if num_gpus >= num_here:
        return None
    return f"--device cuda: {num_here} ranks on a machine need a GPU each, and torch finds {num_gpus} here."


def step_budget(config: ServeConfig, device: str = "cpu", gpu: GpuFacts | None = None) -> int:
    """Return the most tokens per step and rank. Several ranks, whose processors may differ, have steps of one size.

    gpu: the one that computes, if it is known.
    """
    in_tiles = device == "cpu" and config.num_ranks == 1 and computes_in_tiles()
    usual = _TOKENS_IN_TILES if in_tiles else _USUAL_TOKENS[device]
    if gpu is not None and gpu.flops is not None and gpu.bandwidth is not None:
        reading_s = _SHARE_OF_WEIGHTS * gpu.total_bytes / gpu.bandwidth
        tokens = _TIMES_THE_READING * reading_s * _ATTAINED * gpu.flops / _FLOPS_PER_TOKEN
        least, most = _LIMITS_ON_GPU
        usual = max(least, min(most, 1 << int(tokens).bit_length() - 1))
    return config.max_num_batched_tokens or max(usual, config.max_num_seqs)


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO, own_cgroup: Path = _OWN_CGROUP) -> int:
    """Return the bytes that this process can take now: the machine's free memory, within the limits of its groups.

    cgroup: the mount point of the control groups, of version 1 or 2. own_cgroup: the file that names this process's
    groups; a limit of any group above it counts as well.
    """
    rooms = [_room(group, files) for files in (_V2, _V1) for group in _memory_groups(cgroup, own_cgroup, files)]
    return max(0, min([_machine_available(meminfo), *(room for room in rooms if room is not None)]))


def what_limits_memory(cgroup: Path = _CGROUP, own_cgroup: Path = _OWN_CGROUP) -> str:
    """Return the subject of a sentence: the smallest limit of this process's groups, else the machine's free memory."""
    limits = [
        limit
        for files in (_V2, _V1)
        for group in _memory_groups(cgroup, own_cgroup, files)
        for name in files.limits
        if (limit := _read_number(group / name)) is not None and limit < _NO_LIMIT_BYTES
    ]
    return f"The memory limit of {show_size(min(limits))}" if limits else "The machine's free memory"


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """The files in which a version of control groups reports memory.

    controller: its name in `/proc/self/cgroup`. mounts: folders below the mount point. limits, used: names of files.
    reclaimable: a key in `memory.stat`.
    """

    controller: str
    mounts: tuple[str, ...]
    limits: tuple[str, ...]
    used: str
    reclaimable: str


_V2 = _GroupFiles("", (".", "unified"), ("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1 = _GroupFiles("memory", ("memory",), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _memory_groups(cgroup: Path, own_cgroup: Path, files: _GroupFiles) -> list[Path]:
    """Return the folders of this process's group and of all groups above it.

    In a container the named path can be the host's, which does not exist there; then the mount itself is the group.
    """
    try:
        lines = [line.split(":", 2) for line in own_cgroup.read_text().splitlines()]
    except OSError:
        lines = []
    own = next((line[2] for line in lines if len(line) == 3 and files.controller in line[1].split(",")), "/")
    path = PurePosixPath("/", own).relative_to("/")
    return [cgroup / mount / group for mount in files.mounts for group in (path, *path.parents)]


def _room(group: Path, files: _GroupFiles) -> int | None:
    """Return the bytes that a group may still take; None if it sets no limit or does not exist."""
    limits = [limit for limit in (_read_number(group / name) for name in files.limits) if limit is not None]
    used = _read_number(group / files.used)
    if not limits or used is None:
        return None
    return min(limits) - used + _read_stat(group / "memory.stat", files.reclaimable)


@dataclass(frozen=True, slots=True)
class KvBudget:
    """The number of KV blocks, and the longest context in tokens that model, setting and memory together allow.

    num_state_slots, num_snapshots: of recurrent states, for running requests and for prefixes; 0 for a model without
    recurrent states. num_window_blocks: blocks for only the layers with a sliding window, which see at most `window`
    tokens; both are 0 if all layers keep their KV in the same blocks.
    """

    num_blocks: int
    max_model_len: int
    num_state_slots: int = 0
    num_snapshots: int = 0
    num_window_blocks: int = 0
    window: int = 0

    @property
    def num_state_rows(self) -> int:
        return self.num_state_slots + self.num_snapshots


@dataclass(frozen=True, slots=True)
class StateDemand:
    """The memory demand of recurrent states: bytes of one state, requests at once, bytes for snapshots.

    cache_memory: None for a default.
    """

    row_bytes: int
    max_num_seqs: int
    cache_memory: int | None

    def num_slots(self, spendable: int) -> int:
        """Return the number of slots: one for every request that may run, or fewer, to leave memory for KV."""
        if spendable < self.row_bytes:
            raise ConfigError(
                f"The recurrent state of a request takes {show_size(self.row_bytes, up=True)}; beside the weights only "
                f"{show_size(spendable)} are free."
            )
        return max(1, min(self.max_num_seqs, int(spendable * _SLOT_SHARE) // self.row_bytes))

    def kv_share(self, memory: int) -> int:
        """Return the bytes for KV out of `memory` bytes for KV and snapshots."""
        if self.cache_memory is None:
            return int(memory / (1 + _SNAPSHOT_SHARE))
        return memory - self.cache_memory if self.cache_memory < memory else memory

    def num_snapshots(self, kv_memory: int, left: int) -> int:
        """Return the number of snapshots from the setting, or from a share of the KV memory out of the `left` bytes."""
        if self.cache_memory == 0:
            return 0
        if self.cache_memory is None:
            return min(int(kv_memory * _SNAPSHOT_SHARE), left) // self.row_bytes
        if self.cache_memory > left:
            raise ConfigError(
                f"--state-cache-memory asks for {show_size(self.cache_memory, up=True)}; beside weights, KV and the "
                f"states of running requests only {show_size(left)} are free."
            )
        if self.cache_memory < self.row_bytes:
            raise ConfigError(
                f"--state-cache-memory holds no snapshot: one takes {show_size(self.row_bytes, up=True)}."
            )
        return self.cache_memory // self.row_bytes


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """The layers with a sliding window: bytes of a block over these layers, and the most tokens that they see.

    max_num_seqs, step_tokens: requests at once, and tokens of one step.
    """

    block_bytes: int
    window: int
    max_num_seqs: int
    step_tokens: int

    def share(self, memory: int, block_bytes: int, block_size: int, max_model_len: int | None) -> tuple[int, int]:
        """Return the numbers of KV blocks and window blocks in `memory` bytes; 0 window blocks if all layers share
        blocks.

        block_bytes: over all layers. max_model_len: a context that has to fit if it can, None for none.
        """
        together = memory // block_bytes
        least = least_window_blocks(self.window, block_size)
        full_bytes = block_bytes - self.block_bytes
        fewest, most = _BLOCKS_PER_WINDOW_BLOCK
        if not full_bytes:
            return (most * together, together) if together >= least else (together, 0)
        step_blocks = -(-self.step_tokens // block_size)
        working = min(self.max_num_seqs * least + step_blocks, together // 2)
        blocks_per_window_block = max(fewest, min(most, _BALANCED_TOKENS // (2 * self.window)))
        count = memory // (blocks_per_window_block * full_bytes + self.block_bytes)
        count = max(count, working, least + step_blocks)
        asked = -(-(max_model_len or 0) // block_size)
        if (memory - count * self.block_bytes) // full_bytes < asked:
            count = max(least, (memory - asked * full_bytes) // self.block_bytes)
        if count >= together:
            return together, 0
        return (memory - count * self.block_bytes) // full_bytes, count

    def least_bytes(self, num_blocks: int, block_bytes: int, block_size: int) -> int:
        """Return the bytes for `num_blocks` KV blocks and the fewest possible window blocks. block_bytes: of all
        layers."""
        least = least_window_blocks(self.window, block_size)
        return num_blocks * (block_bytes - self.block_bytes) + least * self.block_bytes


class LittleKvError(ConfigError):
    """The memory for KV holds fewer tokens than are asked for, or fewer than two blocks."""


def plan_kv(
    *,
    block_bytes: int,
    block_size: int,
    available_bytes: int,
    kv_cache_memory: int | None,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    most_bytes: int,
    states: StateDemand | None = None,
    windows: WindowDemand | None = None,
) -> KvBudget:
    """Size the KV pools, and the pool of recurrent states if there are any.

    available_bytes: the free memory beside the weights. most_bytes: of KV where `kv_cache_memory` is None.

    Without a setting KV and snapshots of states take 0.85 of it, and KV no more than four contexts for each of
    `max_num_seqs` requests. Raise ConfigError if `max_model_len` is given and does not fit; the model's own context is
    clamped to the pool instead.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(f"--max-model-len {max_model_len} exceeds the model's {model_max_len} tokens.")
    spendable = max(0, available_bytes - RESERVE_BYTES)
    num_slots = 0
    if states is not None:
        num_slots = states.num_slots(spendable)
        spendable -= num_slots * states.row_bytes
    if kv_cache_memory is None:
        contexts = _MOST_CONTEXTS * max_num_seqs * -(-(max_model_len or model_max_len) // block_size) * block_bytes
        share = int(spendable * _KV_SHARE) if states is None else states.kv_share(int(spendable * _KV_SHARE))
        memory = min(share, contexts, most_bytes)
    elif kv_cache_memory > spendable:
        raise ConfigError(
            f"--kv-cache-memory asks for {show_size(kv_cache_memory, up=True)}; beside the weights only "
            f"{show_size(spendable)} are free."
        )
    else:
        memory = kv_cache_memory
    try:
        kv = share_kv(
            memory,
            block_bytes=block_bytes,
            block_size=block_size,
            model_max_len=model_max_len,
            max_model_len=max_model_len,
            windows=windows,
        )
    except LittleKvError as error:
        if kv_cache_memory is not None:
            raise
        raise ConfigError(
            f"{what_limits_memory()} is too small: beside the weights {show_size(available_bytes)} are free, and steps "
            f"take {show_size(RESERVE_BYTES, up=True)} of it. {error}"
        ) from None
    if states is None:
        return kv
    taken = memory if kv.num_window_blocks else kv.num_blocks * block_bytes
    num_snapshots = states.num_snapshots(memory, spendable - taken)
    return replace(kv, num_state_slots=num_slots, num_snapshots=num_snapshots)


def share_kv(
    memory: int,
    *,
    block_bytes: int,
    block_size: int,
    model_max_len: int,
    max_model_len: int | None,
    windows: WindowDemand | None,
) -> KvBudget:
    """Return the budget of pools of `memory` bytes. Raise ConfigError as `plan_kv` does.

    block_bytes: over all layers. windows: of the layers with a sliding window, None if all layers share blocks.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(f"--max-model-len {max_model_len} exceeds the model's {model_max_len} tokens.")
    num_blocks, num_window_blocks = memory // block_bytes, 0
    if windows is not None and windows.window + block_size < (max_model_len or model_max_len):
        num_blocks, num_window_blocks = windows.share(memory, block_bytes, block_size, max_model_len)
    capacity = num_blocks * block_size
    wanted = max_model_len or model_max_len
    if num_blocks < 2 or (max_model_len is not None and capacity < max_model_len):
        needed = -(-(max_model_len or 2 * block_size) // block_size) * block_bytes
        if windows is not None:
            needed = min(needed, windows.least_bytes(needed // block_bytes, block_bytes, block_size))
        raise LittleKvError(
            f"{show_size(memory)} of KV memory hold {capacity} tokens; {max_model_len or 2 * block_size} tokens need "
            f"{show_size(needed, up=True)} (--kv-cache-memory)."
        )
    window = 0 if windows is None or not num_window_blocks else windows.window
    return KvBudget(num_blocks, min(wanted, capacity), num_window_blocks=num_window_blocks, window=window)


def kv_memory(
    *, total_bytes: int, free_bytes: int, reserved_bytes: int, peak_bytes: int, utilization: float, graph_bytes: int
) -> int:
    """Return the bytes for KV with which at most `utilization` of the device is used; 0 if nothing is left.

    total_bytes, free_bytes: as the driver reports. reserved_bytes: held by this process's allocator now. peak_bytes:
    the most it has handed out at a time, weights included, in a step of the largest size. graph_bytes: of the graphs.
    """
    of_others = max(0, total_bytes - free_bytes - reserved_bytes)
    return max(0, int(total_bytes * utilization) - of_others - peak_bytes - graph_bytes)


def _machine_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} does not tell MemAvailable")


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if the file is missing or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
