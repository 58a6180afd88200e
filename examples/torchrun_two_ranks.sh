#!/usr/bin/env bash
# Experts shared by two ranks of one machine. MODEL, by default the demo, and options of `moeserve serve` may follow.
# `moeserve serve MODEL --expert-parallel-size 2` does the same without torchrun.
set -euo pipefail
exec torchrun --standalone --nproc-per-node 2 -m launcher.worker "${1:-demo}" "${@:2}"
