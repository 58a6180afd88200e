"""`moeserve bench decode`."""

from __future__ import annotations

from moeserve.bench.passed_through import passed_through

command = passed_through("decode", "moeserve.bench.decode_throughput")
