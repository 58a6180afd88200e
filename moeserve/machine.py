"""The machine that a model would run on: cores, memory, GPUs, and how fast it reads memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.device import available_bytes, incapability
from moeserve.gpu_faults import cuda_is_available, lacks_kernels, reason_of, without_warnings

if TYPE_CHECKING:
    import torch

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_NUMA_NODES = Path("/sys/devices/system/node")
# Instruction sets that decide the speed of products, as Linux names them, best first.
_INSTRUCTION_SETS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
}
# The size of each of the two buffers for copying: several times the size of caches.
_COPIED_BYTES = 192 * 2**20
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Gpu:
    """capability: compute capability. shared_bytes: the shared memory that a program may have. bandwidth: bytes per
    second, read plus written; None if it was not measured. obstacle: why it cannot serve. flops: dense operations per
    second on 16 bits with sums in 32; None if they are not known."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    shared_bytes: int
    bandwidth: float | None = None
    obstacle: str | None = None
    flops: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: the cores that this process may use. memory_bytes: of the machine. free_bytes: the memory that this
    process can take now, within the limits of its control groups. bandwidth: of main memory, bytes per second read plus
    written by a copy on all cores; None if it was not measured. num_nodes: NUMA nodes with cores that this process may
    use."""

    processor: str
    cores: int
    instruction_sets: tuple[str, ...]
    memory_bytes: int
    free_bytes: int
    bandwidth: float | None = None
    gpus: tuple[Gpu, ...] = ()
    num_nodes: int = 1


def read_machine(cores: int) -> Machine:
    """Describe this machine. It copies memory for a part of a second, if enough is free."""
    processor, instruction_sets = read_processor()
    free_bytes = available_bytes()
    return Machine(
        processor,
        cores,
        instruction_sets,
        _total_memory(),
        free_bytes,
        _bandwidth_of_memory(cores) if free_bytes > 4 * _COPIED_BYTES else None,
        find_gpus(),
        num_usable_nodes(numa_nodes()),
    )


def numa_nodes(folder: Path = _NUMA_NODES) -> list[list[int]]:
    """Return the cores of each NUMA node that has some, by the nodes' numbers; nothing where Linux does not tell."""
    nodes = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    return [cores for file in nodes if (cores := _cores_in(file.read_text()))]


def num_usable_nodes(nodes: Sequence[Sequence[int]]) -> int:
    """Return how many NUMA nodes have cores that this process may use. nodes: their cores."""
    return max(1, sum(not os.sched_getaffinity(0).isdisjoint(node) for node in nodes))


def _cores_in(text: str) -> list[int]:
    """Return the numbers in a list such as `0-3,8`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def read_processor() -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and its instruction sets, best first."""
    lines = [line.partition(":") for line in _CPUINFO.read_text().splitlines()]
    said = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = (said.get("flags") or said.get("Features") or "").split()
    name = said.get("model name") or said.get("CPU implementer") or "unknown"
    return name, tuple(shown for flag, shown in _INSTRUCTION_SETS.items() if flag in flags)


def _total_memory() -> int:
    line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024


def _bandwidth_of_memory(cores: int) -> float:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        return _copied_per_second(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def _copied_per_second(device: torch.device) -> float:
    """Copy memory a few times; return the bytes read and written per second of the fastest copy."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    source = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(_ROUNDS):
        finish()
        start = time.perf_counter()
        target.copy_(source)
        finish()
        seconds.append(time.perf_counter() - start)
    return 2 * _COPIED_BYTES / min(seconds)


def find_gpus() -> tuple[Gpu, ...]:
    """Describe the GPUs of this machine. Those that can serve copy memory for a part of a second, if enough is free."""
    import torch

    if not cuda_is_available():
        return ()
    with without_warnings():
        return tuple(_describe(torch.device("cuda", number)) for number in range(torch.cuda.device_count()))


def _describe(device: torch.device) -> Gpu:
    import torch

    from kernels.gpu.device import shared_memory_of

    properties = torch.cuda.get_device_properties(device)
    capability, total = (properties.major, properties.minor), properties.total_memory
    obstacle = incapability(capability, needs_fp8=False) or lacks_kernels(capability, torch.cuda.get_arch_list())
    free, bandwidth = 0, None
    try:
        free, total = torch.cuda.mem_get_info(device)
        if obstacle is None and free > 4 * _COPIED_BYTES:
            bandwidth = _copied_per_second(device)
    except torch.OutOfMemoryError:
        free = 0  # Another process has taken it meanwhile.
    except RuntimeError as error:
        # No room is left for CUDA itself, or another process has the GPU alone.
        obstacle = obstacle or f"torch cannot use it: {reason_of(error)}"
    return Gpu(properties.name, total, free, capability, shared_memory_of(device), bandwidth, obstacle)
