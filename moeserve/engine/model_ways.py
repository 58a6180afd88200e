"""The ways to share a model among the GPUs or NUMA nodes of a machine, by the cost model of `moeserve.engine.ways`."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from moeserve.config import ServeConfig
from moeserve.engine.known_model import NativeModel
from moeserve.engine.memory_plan import compute_dtype, native_dtype, rounding_of
from moeserve.engine.ways import LOOPBACK, NVLINK, PCIE, Estimate, Link, ModelCosts, RankMachine, estimates_of
from moeserve.engine.weight_bytes import no_experts, weights_bytes
from moeserve.machine import Machine
from moeserve.model.checkpoint import plan_weights
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.shards import check_shards
from moeserve.model.spec import DecoderSpec, MlaSpec, UnsupportedModel

# GPUs of these makes have links of their own, as machines with several of them are sold.
_WITH_NVLINK = ("A100", "H100", "H20", "B200")
# Seconds that a layer takes beside reading; 44 to 72 us were measured on an H200 (docs/benchmarks/ways.md).
_LAYER_SECONDS = 50e-6
_CONTEXT = 8192  # tokens of each request
# Bits of an expert's number by its form of `--quantization`, of 16 without.
_EXPERT_BITS = {"int8": 8.5, "fp8": 8.5, "int4": 4.5}
MANY = 16  # requests of the second figure
_MOST_SHARDS = 64


@dataclass(frozen=True, slots=True)
class ModelWays:
    """Estimates for `num_ranks` ranks, each on one of `what`."""

    num_ranks: int
    what: str
    link: Link
    estimates: list[Estimate]


def ways_here(model: NativeModel, machine: Machine, config: ServeConfig) -> ModelWays | None:
    """Return the ways to share a model among the machine's GPUs, else its NUMA nodes; None where there is one."""
    gpus = [gpu for gpu in machine.gpus if gpu.obstacle is None]
    if len(gpus) > 1 and config.device != "cpu":
        least = min(gpus, key=lambda gpu: gpu.free_bytes)
        if least.bandwidth is None:
            return None
        costs = _costs_on_gpu(model, config)
        usable = int(least.free_bytes * config.gpu_memory_utilization)
        link = NVLINK if least.name.startswith(_WITH_NVLINK) else PCIE
        ways = _ways(costs, len(gpus), least.name, RankMachine(usable, least.bandwidth, _LAYER_SECONDS), link)
        # On GPUs no two ways go together.
        return replace(ways, estimates=[one for one in ways.estimates if one.way.is_single])
    num_nodes = machine.num_nodes
    if num_nodes == 1 or machine.bandwidth is None or config.device == "cuda":
        return None
    of_node = RankMachine(machine.free_bytes // num_nodes, machine.bandwidth / num_nodes, _LAYER_SECONDS)
    return _ways(_costs_on_cpu(model, config), num_nodes, "NUMA node", of_node, LOOPBACK)


def _ways(costs: ModelCosts, num_ranks: int, what: str, machine: RankMachine, link: Link) -> ModelWays:
    return ModelWays(num_ranks, what, link, estimates_of(costs, machine, link, num_ranks, MANY, _CONTEXT))


def _costs_on_gpu(model: NativeModel, config: ServeConfig) -> ModelCosts:
    dtype = compute_dtype(config, "cuda")
    others = plan_weights(model.spec, model.index, no_experts).loaded_num_bytes(dtype.itemsize, narrow=False)
    experts = plan_weights(model.spec, model.index).loaded_num_bytes(dtype.itemsize, narrow=False) - others
    experts = int(experts * _EXPERT_BITS.get(config.weight_forms.experts, 16.0) / 16.0)
    return _costs(model, others, experts, dtype)


def _costs_on_cpu(model: NativeModel, config: ServeConfig) -> ModelCosts:
    dtype, rounding = native_dtype(config, "cpu"), rounding_of(config, model.spec, model.index)
    others = weights_bytes(model.spec, dtype, model.index, [no_experts], rounding)
    experts = weights_bytes(model.spec, dtype, model.index, [None], rounding) - others
    return _costs(model, others, experts, dtype)


def shard_counts(spec: DecoderSpec) -> Collection[int]:
    """Return into how many shards a model can be cut."""
    found = []
    for count in range(2, _MOST_SHARDS + 1):
        with suppress(UnsupportedModel):
            check_shards(spec, count)
            if spec.moe is None or not spec.moe.num_experts % count:
                found.append(count)
    return found


def num_kv_heads(spec: DecoderSpec) -> int:
    """Return how many heads share a token's keys and values; a latent is whole."""
    return 1 if isinstance(spec.attention, MlaSpec) else spec.attention.num_kv_heads


def _costs(model: NativeModel, others: int, experts: int, dtype: torch.dtype) -> ModelCosts:
    """others, experts: bytes of all weights but experts, and of all experts."""
    spec, num_moe_layers = model.spec, len(model.spec.moe_layers)
    num_experts = 0 if spec.moe is None else spec.moe.num_experts
    embedding = spec.vocab_size * spec.hidden_size * min(2, dtype.itemsize)
    return ModelCosts(
        spec.num_layers,
        spec.hidden_size,
        shard_counts(spec),
        num_kv_heads(spec),
        embedding,
        others - embedding,
        kv_block_bytes(spec.kv_layers, 1, dtype),
        num_moe_layers,
        num_experts,
        0 if spec.moe is None else spec.moe.gate.top_k,
        experts // (num_moe_layers * num_experts) if experts else 0,
    )
