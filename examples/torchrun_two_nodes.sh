#!/usr/bin/env bash
# Experts shared by two machines, one rank on each: run it on both, with node 0's address and 0 or 1.
#   moeserve curve-key moeserve.key                     # once; copy the file to both
#   ./torchrun_two_nodes.sh 10.0.0.10 0 MODEL           # HTTP is served here
#   ./torchrun_two_nodes.sh 10.0.0.10 1 MODEL
set -euo pipefail
address=${1:?address of node 0} node=${2:?0 or 1} model=${3:-demo}
exec torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$node" \
  --rdzv-backend static --rdzv-endpoint "$address:${RDZV_PORT:-29500}" \
  -m launcher.worker "$model" --curve-key-file "${CURVE_KEY:-moeserve.key}" "${@:4}"
