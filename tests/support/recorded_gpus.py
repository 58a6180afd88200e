"""What the makers of GPUs say of them that decides what compiles for them, without one at hand."""

from __future__ import annotations

from launcher.gpu_table import all_gpus

GPUS = all_gpus()
# Bytes of shared memory that a program may have, by compute capability as Triton writes it.
SHARED_BYTES = {10 * gpu.capability[0] + gpu.capability[1]: gpu.shared_bytes for gpu in GPUS if gpu.obstacle is None}
HOPPER = 90
