"""The part of assembling a rank that is particular to a GPU. Importing this module loads Triton."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experts.observer import AnyObserver
from experts.routing.tap import RoutingTap
from kernels.activation import Activation
from kernels.cpu.library import native_kernels_absence
from kernels.gpu.compile_ahead import compile_ahead
from kernels.gpu.device import multiprocessor_of
from kernels.gpu.moe import TritonMoe
from kernels.gpu.moe_weights import ExpertStorage, GpuExperts
from kernels.gpu.ops import GpuOps
from kernels.packed_experts import Experts
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import GRAPH_BYTES, KvBudget, StateDemand, available_bytes, step_budget
from moeserve.engine.experts.gpu_memory import (
    GpuExpertSettings,
    GpuResidentModel,
    open_gpu_experts,
    plan_gpu_residency,
)
from moeserve.engine.experts.settings import measured_load
from moeserve.engine.rank import Group, Prepared
from moeserve.engine.ranks.partners import RankPartners
from moeserve.engine.ranks.pipe import Pipe
from moeserve.engine.ranks.together import OnePlanSteps, captures_decodes
from moeserve.model.checkpoint import OwnedExperts, read_index
from moeserve.model.decoder import Decoder, StepDecoder
from moeserve.model.expert_weights import LayerExperts, shapes_of_experts
from moeserve.model.gpu.kernels import (
    attention_shape,
    check_shared_memory,
    expert_configs,
    expert_storage,
    kv_dtype_of,
    rows_at_once,
    triton_moe,
)
from moeserve.model.gpu.model import (
    GpuSettings,
    allocated_bytes,
    compute_largest_step,
    forget_peak,
    free_for_kv,
    kernels_to_launch,
    kv_blocks,
    make_runner,
    measure_graphs,
)
from moeserve.model.gpu.runner import Peers
from moeserve.model.gpu.setup import alone, launch_expert_variants
from moeserve.model.kv_pool import kv_pool_bytes
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec
from moeserve.model.spec import Progress as StageProgress
from moeserve.model.step_arrays import capture_sizes
from moeserve.model.tensor_reader import Progress

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives, DeviceWaits
    from experts.parallel.dispatch import Compute

# All experts of a model may take this share of the free host memory; otherwise they are read from disk.
_SHARE_FOR_EXPERTS = 0.8
# The seconds that ranks wait for each other while they compile.
_SECONDS_TO_COMPILE = 600.0
_MANY = 2**62  # blocks or states, where a rank has no layer that needs them
_SECONDS_BETWEEN_LINES = 5.0


def gpu_settings(config: ServeConfig, states: StateDemand | None, *, keeps_stored: bool = False) -> GpuSettings:
    """keeps_stored: see `Rounding`."""
    return GpuSettings(
        config.block_size,
        config.max_num_seqs,
        step_budget(config, "cuda"),
        config.max_model_len,
        config.kv_cache_memory,
        config.gpu_memory_utilization,
        config.enforce_eager,
        kv_dtype=kv_dtype_of(config.kv_cache_dtype),
        expert_form=config.weight_forms.experts,
        states=states,
        keeps_stored=keeps_stored,
    )


def gpu_expert_settings(directory: Path, spec: DecoderSpec, config: ServeConfig) -> GpuExpertSettings | None:
    """Return the settings for experts that are not all in GPU memory; None without `--expert-memory`.

    Each rank of this machine may take an equal share of the host memory that is free now.
    """
    if config.expert_memory is None:
        return None
    # With rebalancing any rank may get any expert, so all are read from disk.
    host_bytes = 0 if config.rebalance_interval else int(_SHARE_FOR_EXPERTS * available_bytes() / config.num_ranks_here)
    return GpuExpertSettings(
        config.expert_memory,
        host_bytes,
        config.expert_policy,
        None if config.expert_store_dir is None else Path(config.expert_store_dir).expanduser(),
        measured_load(directory, config, (len(spec.moe_layers), 0 if spec.moe is None else spec.moe.num_experts)),
        config.expert_compute,
        lambda: _host_rounding(directory, spec, config),
    )


def _host_rounding(directory: Path, spec: DecoderSpec, config: ServeConfig) -> Rounding | str:
    """Return how the host keeps the experts that it computes in place of the GPU, as a CPU's service keeps them.

    Return the reason where it computes none. Raise ConfigError where `--expert-compute host` is impossible.
    """
    if config.expert_compute == "copy":
        return "--expert-compute copy"
    obstacle = None
    if config.quantization != "none":
        obstacle = f"the host does not round experts as --quantization {config.quantization} does"
    elif config.rebalance_interval:
        obstacle = "with --rebalance-interval all experts are read from disk"
    elif (absence := native_kernels_absence()) is not None:
        obstacle = f"the host needs the compiled kernels. {absence.removesuffix('.')}"
    if obstacle is None:
        # Imported late: it needs packages that only a service has.
        from moeserve.engine.memory_plan import rounding_of

        dtype = "bfloat16" if config.dtype in ("auto", "bfloat16") else "float32"
        # As on the GPU, rows are not rounded to 8 bits: an expert's result hardly depends on where it is computed.
        on_cpu = replace(config, device="cpu", dtype=dtype, arithmetic="exact")
        return rounding_of(on_cpu, spec, read_index(directory))
    if config.expert_compute == "host":
        raise ConfigError(f"--expert-compute host: {obstacle}.")
    return obstacle


class GpuBody:
    """Implements `moeserve.engine.assemble.Body` on a GPU.

    On a CPU device Triton's interpreter runs the same code, over gloo if there are other ranks.
    """

    def __init__(
        self,
        directory: Path,
        spec: DecoderSpec,
        dtype: torch.dtype,
        rounding: Rounding,
        settings: GpuSettings,
        bounded: GpuExpertSettings | None,
        device: torch.device,
        observers: Sequence[AnyObserver],
        progress: Progress,
        told: StageProgress,
        *,
        owned: OwnedExperts | None,
        replays_with: str | None,
        collectives: Collectives | None,
        shared: Pipe | RankPartners | None = None,
    ) -> None:
        """Allocate scratch. If `--expert-memory` does not hold all experts, also allocate slots and open the tier
        below.

        rounding: of the checkpoint's weights. bounded: the settings of `--expert-memory`. told: hears what is done
        between loading and the first request. owned: among several ranks, this rank's experts. replays_with: the shape
        of dispatch of ranks that share experts alone. shared: the part of the model that this rank has, None for all
        layers and all of them but experts. Raise ConfigError or ModelError.
        """
        self._collectives, self._shared = collectives, shared
        shapes = shapes_of_experts(directory, spec, dtype, rounding)
        whole, spec = spec, spec if shared is None else shared.part
        self._spec, self._dtype, self._device = spec, dtype, device
        self.depth = shared.num_stages - 1 if isinstance(shared, Pipe) else 1
        storage = expert_storage(spec, dtype, settings.expert_form, shapes)
        self._storage = storage = replace(storage, fp8_products=rounding.fp8_products)
        multiprocessor = multiprocessor_of(device)
        check_shared_memory(
            spec, storage, attention_shape(spec, settings.block_size, dtype, multiprocessor, settings.kv_dtype)
        )
        self._configs = configs = expert_configs(spec, storage, device)
        max_rows = settings.max_num_batched_tokens
        residency = None
        if bounded is not None:
            residency = plan_gpu_residency(whole, dtype, bounded.num_bytes, storage, owned, rounding, shapes)
        self.resident: GpuResidentModel | None = None
        moe: TritonMoe | None = None
        if bounded is not None and residency is not None:

            def without_stage(_: str, done: int, total: int) -> None:
                progress(done, total)

            self.resident = open_gpu_experts(
                directory, residency, bounded, device, max_rows, without_stage, configs, observers
            )
        elif configs is not None:
            num_slots = None if owned is None else max(len(owned(layer)) for layer in spec.moe_layers)
            moe = triton_moe(configs, device, dtype, max_rows, num_slots)
        self._in_pieces = None if moe is None else in_pieces(moe, max_rows)
        self.ops = GpuOps(device, storage, moe)
        # With resident experts the host decides in every layer what to load, so no step can be captured.
        eager = settings.enforce_eager or self.resident is not None
        if replays_with is not None:
            all_here = self.resident is None
            eager = not captures_decodes(replays_with, eager=settings.enforce_eager, all_resident=all_here)
        self._settings = replace(settings, enforce_eager=eager)
        self.captured_sizes = () if eager else capture_sizes(settings.max_num_seqs)
        self._weights_bytes = 0
        self._told, self._began, self._seconds = told, time.monotonic(), dict[str, float]()

    def _passed(self, part: str) -> None:
        """Count the time since the last call, or since the body was opened, as a part of the start."""
        now = time.monotonic()
        self._seconds[part], self._began = round(now - self._began, 1), now

    def compute_of(self, layer: int) -> Compute[GpuExperts]:
        if self.resident is not None:
            assert self._collectives is not None
            return _wait_first(self.resident.layers[layer].partial, self._collectives.waits)
        assert self._in_pieces is not None
        return self._in_pieces

    def take_expert(self, reader: LayerExperts) -> GpuExperts:
        """Read into host memory, quantised."""
        return ExpertStorage(reader.shape, self._storage).store(reader.read_matrices(0), torch.device("cpu"))

    def install_expert(self, experts: Experts, slot: int, taken: GpuExperts) -> None:
        _stored(experts).copy_slot(slot, taken)

    def record_loaded(self) -> None:
        self._passed("load_s")
        self._weights_bytes = allocated_bytes(self._device)
        forget_peak(self._device)

    @torch.inference_mode()
    def meet(self, decoder: StepDecoder, group: Group) -> None:
        """Compile the experts' kernels with long waits: ranks do not compile equally fast."""
        group.collectives.be_patient(_SECONDS_TO_COMPILE)
        assert isinstance(decoder, Decoder)
        spec, configs, max_rows = self._spec, self._configs, self._settings.max_num_batched_tokens
        assert spec.moe is not None
        assert configs is not None
        # One layer of each storage.
        for place in {
            self._forms_of(decoder, place): place for place in reversed(range(len(spec.moe_layers)))
        }.values():
            experts = _stored(decoder.experts[place])
            ids = range(experts.gate_up.num_slots) if self.resident is None else group.experts.experts_here(place)
            compute = self.compute_of(spec.moe_layers[place])
            launch_expert_variants(compute, experts, decoder, spec.moe, configs.variant, max_rows, sorted(ids))

    def _forms_of(self, decoder: Decoder, place: int) -> tuple[object, object]:
        if self.resident is None:
            experts = _stored(decoder.experts[place])
        else:
            experts = self.resident.layers[self._spec.moe_layers[place]].experts.resident
        return experts.gate_up.form, experts.down.form

    def prepare(self, decoder: StepDecoder, tap: RoutingTap | None, group: Group | None) -> Prepared:
        """Compile all kernels, compute the largest step, and allocate the memory that is left for KV.

        All ranks allocate as much as the rank with the least memory left. Raise ConfigError if none is left.
        """
        assert isinstance(decoder, Decoder)
        settings, shared, collectives = self._settings, self._shared, self._collectives
        peers: Peers | None = None if group is None else group.steps
        if shared is not None and collectives is not None:
            peers = OnePlanSteps(collectives, shared)
            collectives.be_patient(_SECONDS_TO_COMPILE)
        if self._device.type == "cuda" and self._computes_experts_alone:
            compiling = _Compiling(self._told)
            place = (0, 1) if collectives is None else (collectives.rank, collectives.num_ranks)
            kernels = kernels_to_launch(decoder, settings, self._configs)
            compiling.end(compile_ahead(kernels, compiling, place=place))
            self._passed("compile_s")
        self._told("computing the largest step", 0, 0)
        compute_largest_step(decoder, settings, alone if peers is None else peers.begin_alike)
        weights_bytes = self._weights_bytes
        self._passed("largest_step_s")
        memory = settings.kv_cache_memory or free_for_kv(self._device, settings, self._graph_bytes(decoder))
        if group is not None:
            memory = group.collectives.agree_on_least(memory)
        kv = kv_blocks(self._spec, self._dtype, settings, memory)
        if shared is not None and collectives is not None:
            kv = _least_of_all(kv, self._spec, collectives)
        kv_bytes = self._kv_bytes(kv)
        runner = make_runner(decoder, kv, settings, self._configs, peers, tap, self._told)
        if self.resident is not None:
            self.resident.share()
        self._passed("kernels_and_graphs_s")
        row_bytes = 0 if settings.states is None else settings.states.row_bytes
        measured = runner.measured
        if collectives is not None:
            weights_bytes = collectives.add_up(weights_bytes)
        if shared is not None and collectives is not None:
            shared.open()
            kv_bytes, row_bytes = collectives.add_up(kv_bytes), collectives.add_up(row_bytes)
        if isinstance(shared, Pipe):
            measured = shared.whole_steps(measured)
            shared.be_patient()
        pools = runner.kv_pool, runner.state_pool
        return Prepared(runner, kv, kv_bytes, weights_bytes, runner.close, row_bytes, *pools, measured, self._seconds)

    @property
    def _computes_experts_alone(self) -> bool:
        """False where experts are on other ranks, or outside of this memory: there the gate's choice is read, so that
        kernels cannot be caught in place of being launched."""
        has_all = self._collectives is None or isinstance(self._shared, Pipe) or self._spec.moe is None
        return has_all and self.resident is None

    def _kv_bytes(self, kv: KvBudget) -> int:
        settings, dtype = self._settings, self._settings.kv_dtype or self._dtype
        return kv_pool_bytes(self._spec.kv_layers, kv.num_blocks, kv.num_window_blocks, settings.block_size, dtype)

    def _graph_bytes(self, decoder: Decoder) -> int:
        """Return the bytes that graphs will take: measured, or an estimate where they exchange rows of ranks."""
        if self._settings.enforce_eager:
            return 0
        return measure_graphs(decoder, self._settings) if self._collectives is None else GRAPH_BYTES


def _least_of_all(kv: KvBudget, part: DecoderSpec, collectives: Collectives) -> KvBudget:
    """Return the budget that all ranks have room for, of which each has the blocks and states of its `part`."""
    is_there = {
        "num_blocks": bool(part.kv_layers),
        "max_model_len": True,
        "num_state_slots": bool(part.state_layers),
        "num_snapshots": bool(part.state_layers),
        "num_window_blocks": any(window is not None for window in part.windows),
        "window": any(window is not None for window in part.windows),
    }
    least = {name: collectives.agree_on_least(getattr(kv, name) if own else _MANY) for name, own in is_there.items()}
    return KvBudget(**{name: 0 if number == _MANY else number for name, number in least.items()})


def _stored(experts: Experts) -> GpuExperts:
    assert isinstance(experts, GpuExperts)
    return experts


class _Compiling:
    """Tells how many kernels are compiled, and writes it to the log every few seconds."""

    def __init__(self, told: StageProgress) -> None:
        import structlog  # Imported late: this module is also measured where structlog is not installed.

        self._log, self._told, self._next_line = structlog.get_logger(__name__), told, 0.0

    def __call__(self, done: int, total: int) -> None:
        self._told("compiling kernels", done, total)
        now = time.monotonic()
        if done == total or now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self._log.info("compiling_kernels", done=done, total=total)

    def end(self, failures: Sequence[str]) -> None:
        if failures:
            self._log.warning("kernels_not_compiled_ahead", failures=failures)


def in_pieces(moe: TritonMoe, max_rows: int) -> Compute[GpuExperts]:
    """Return a function that computes any number of rows with scratch for `max_rows`, piece by piece.

    A row's bits depend on its piece only through the kernel configuration for the piece's number of rows.
    """

    def compute(
        x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, activation: Activation
    ) -> torch.Tensor:
        if len(x) <= max_rows:
            return moe.partial(x, slots, weights, experts, activation)
        size = rows_at_once(len(x), max_rows)
        pieces = zip(x.split(size), slots.split(size), weights.split(size), strict=True)
        return torch.cat([moe.partial(*piece, experts, activation) for piece in pieces])

    return compute


def _wait_first(compute: Compute[GpuExperts], waits: DeviceWaits) -> Compute[GpuExperts]:
    """Return `compute` behind a wait with a time limit.

    `compute` reads the arrived rows on the host and would wait forever for a rank that is lost.
    """

    def waited(
        x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, activation: Activation
    ) -> torch.Tensor:
        waits.wait_for_device()
        return compute(x, ids, weights, experts, activation)

    return waited
