"""`moeserve tune`."""

from __future__ import annotations

from moeserve.bench.passed_through import passed_through

tune = passed_through("tune", "moeserve.bench.tune_kernels")
