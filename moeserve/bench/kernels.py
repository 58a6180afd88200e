"""`moeserve bench kernels`."""

from __future__ import annotations

from moeserve.bench.passed_through import passed_through

command = passed_through("kernels", "moeserve.bench.kernel_bench")
