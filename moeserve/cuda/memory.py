"""How many bytes of a GPU's memory are left for KV. No torch here."""

from __future__ import annotations

# Graphs keep what a decode step allocates, once for all sizes, and the driver's copies of their nodes. An estimate.
GRAPH_BYTES = 512 * 2**20


def kv_memory(
    *, total_bytes: int, free_bytes: int, reserved_bytes: int, peak_bytes: int, utilization: float, with_graphs: bool
) -> int:
    """Bytes for KV so that no more than `utilization` of the device is used; 0 if nothing is left.

    total_bytes and free_bytes as the driver tells, reserved_bytes what this process's allocator holds now, peak_bytes
    the most it has handed out at a time, weights included, in a step of the largest size.
    """
    of_others = max(0, total_bytes - free_bytes - reserved_bytes)
    graphs = GRAPH_BYTES if with_graphs else 0
    return max(0, int(total_bytes * utilization) - of_others - peak_bytes - graphs)
