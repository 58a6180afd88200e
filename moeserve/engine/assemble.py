"""Assemble a rank from a folder and settings, in the same way on every device and for any number of ranks.

spec -> memory plan (`plan_model`) -> weights (`load_rank`) -> KV memory, warm-up, observers (`LoadedRank.start`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog
import torch

from experts.memory.residency import ExpertMemoryStats
from experts.observer import AnyObserver
from experts.placement.rebalance import ExpertMigrator
from experts.prediction.prefetcher import PrefetchObserver
from experts.routing.gates import FittedGatesError
from experts.routing.tap import RoutingTap
from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.ops import Ops
from kernels.packed_experts import Experts
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import current_gpu, step_budget
from moeserve.engine.cpu_body import CpuBody
from moeserve.engine.experts.kept import ExpertFileWriter, KeptExperts, keep_experts
from moeserve.engine.experts.memory import open_experts
from moeserve.engine.experts.observe import SentCounter
from moeserve.engine.experts.prefetch import find_fitted_gates, start_prefetching
from moeserve.engine.experts.resident_model import ResidentModel, experts_of, in_mib
from moeserve.engine.memory_plan import ModelPlan, cpu_kv_dtype, state_demand
from moeserve.engine.rank import Group, ObservedRunner, Prepared, Rank, ServedModel, StepProgress
from moeserve.engine.ranks.partners import FirstRanksRows, OwnExperts, RankPartners
from moeserve.engine.ranks.pipe import Pipe
from moeserve.engine.ranks.together import GroupSteps, ShapeChoice
from moeserve.engine.weight_bytes import no_experts, owned_experts
from moeserve.gpu_faults import gpu_faults_in_words
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.decoder import StepDecoder
from moeserve.model.expert_store import stored_experts
from moeserve.model.expert_weights import LayerExperts, Rereader
from moeserve.model.generation import GenerationDefaults, load_generation_defaults
from moeserve.model.spec import NO_NUMBERS, CheckpointError, DecoderSpec
from moeserve.model.spec import Progress as StageProgress
from moeserve.model.stages import stages_of
from moeserve.model.tensor_reader import Progress
from moeserve.model.weights import DispatchOf, PackedLayer, load_decoder
from moeserve.plan import Chunk, SamplingParams, StateUse, StepPlan
from moeserve.scheduling.steps import Runner
from moeserve.settings.generation import parse_generation
from moeserve.statuses import Report, progress_to

if TYPE_CHECKING:
    # Both import torch.distributed and deepspeed, which a single rank does not need.
    from experts.parallel.collectives import Collectives
    from experts.parallel.dispatch import Compute
    from moeserve.model.gpu.model import GpuSettings  # It loads Triton.

# The tokens of the first prompt, unless a block holds fewer.
_PROMPT_TOKENS = 4

log = structlog.get_logger(__name__)


class Body(Protocol):
    """The part of assembling a rank that depends on the device: `CpuBody` or `moeserve.engine.gpu_body.GpuBody`.

    resident: None where all experts are in memory. captured_sizes: the sizes of decode steps that ranks replay. depth:
    see `moeserve.scheduling.steps.Steps`.
    """

    @property
    def ops(self) -> Ops: ...

    @property
    def resident(self) -> ResidentModel[Any] | None: ...

    @property
    def captured_sizes(self) -> Sequence[int]: ...

    @property
    def depth(self) -> int: ...

    def compute_of(self, layer: int) -> Compute[Any]:
        """Return the function that computes arrived rows in a decoder layer. Only for several ranks."""

    def take_expert(self, reader: LayerExperts) -> Any:
        """Read a migrating expert, the only one of `reader`, into memory of its own."""

    def install_expert(self, experts: Experts, slot: int, taken: Any) -> None:
        """Copy the result of `take_expert` into a slot of a layer's experts, between two steps."""

    def record_loaded(self) -> None:
        """Measure the memory of the weights, which are loaded now."""

    def meet(self, decoder: StepDecoder, group: Group) -> None:
        """Prepare for the first exchange of rows between ranks."""

    def prepare(self, decoder: StepDecoder, tap: RoutingTap | None, group: Group | None) -> Prepared:
        """Allocate KV memory and get the device ready for any step.

        tap: observes the decoder's gates.
        """


@gpu_faults_in_words()
def load_rank(
    directory: Path,
    plan: ModelPlan,
    config: ServeConfig,
    report: Report,
    collectives: Collectives | None = None,
    num_packers: int | None = None,
) -> LoadedRank:
    """Read a rank's weights. collectives: None on a single rank. num_packers: see `CpuOps`. Raise ModelError or
    ConfigError.

    The resident experts and the decoder get one list of observers, which `LoadedRank.start` completes before the first
    step: the prefetcher is an observer and needs both, so it can only be made after them.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    spec, share = plan.spec, _share(plan, config, collectives)
    observers: list[AnyObserver] = []
    body: Body
    if plan.device == "cpu":
        body = _open_cpu_body(directory, plan, config, report, observers, share, num_packers)
    else:
        body = _open_gpu_body(directory, plan, config, report, observers, share)
    tap = None
    if spec.moe is not None and config.record_experts:
        tap = RoutingTap(len((spec if share.pipe is None else share.pipe.part).moe_layers), spec.moe.num_experts)
        observers.append(tap)
    group = None
    if share.peers is not None and (share.partners is None or config.expert_parallel_size > 1):
        group = _make_group(config, plan, body, share.peers)
    kept: KeptExperts | None = None
    if isinstance(spec, DecoderSpec) and config.expert_store_dir is not None and config.expert_memory is None:
        kept = keep_experts(directory, spec, plan.dtype, plan.rounding, config, report)
    packed_experts = None if kept is None else kept.layer_of
    decoder = _load_decoder(
        directory,
        plan,
        share,
        packed_experts,
        ops=body.ops,
        max_model_len=plan.kv.max_model_len or config.max_model_len,
        owned_experts=share.owned if body.resident is None and packed_experts is None else no_experts,
        dispatch_of=_dispatch_of(plan, body, group, share.partners),
        observers=observers,
        progress=_progress(plan, report),
    )
    return LoadedRank(directory, plan, config, body, decoder, observers, tap, share, group, kept)


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's share of the model among several ranks.

    peers: the ranks that share its layers' experts, of which it has `owned`. pipe: its stage, None where it has all
    layers. partners: the ranks that share each of its layers, None where it has each as a whole, but for experts.
    """

    collectives: Collectives | None = None
    peers: Collectives | None = None
    owned: OwnedExperts | None = None
    pipe: Pipe | None = None
    partners: RankPartners | None = None


def _share(plan: ModelPlan, config: ServeConfig, collectives: Collectives | None) -> _Share:
    if collectives is None:
        return _Share()
    spec, on_cpu = plan.spec, plan.device == "cpu"
    owned = pipe = partners = peers = None
    if plan.placement is not None:
        peers = collectives.part_of(plan.placement.num_ranks)
        owned = owned_experts(spec, plan.placement, peers.rank)
    if plan.layers:
        assert isinstance(spec, DecoderSpec)
        max_rows = 0 if on_cpu else step_budget(config, plan.device)
        pipe = Pipe(collectives, stages_of(plan.layers), spec, plan.dtype, max_rows=max_rows)
    if config.tensor_parallel_size > 1:
        assert isinstance(spec, DecoderSpec)
        others = collectives.part_of(config.tensor_parallel_size)
        partners = RankPartners(others, spec, spec if pipe is None else pipe.part, is_open=on_cpu)
    return _Share(collectives, peers, owned, pipe, partners)


def _dispatch_of(plan: ModelPlan, body: Body, group: Group | None, partners: RankPartners | None) -> DispatchOf | None:
    """Return how rows reach their experts, by layer; None if each layer has all of its experts in memory here."""
    if partners is not None and plan.placement is not None:
        if group is not None:
            return FirstRanksRows(partners.shard, group.experts.dispatch_of).dispatch_of
        return OwnExperts(
            plan.placement,
            plan.spec.moe_layers,
            partners.shard.number,
            body.compute_of,
            by_ids=body.resident is not None,
            device=body.ops.device,
        ).dispatch_of
    if group is not None:
        return group.experts.dispatch_of
    return None if body.resident is None else body.resident.dispatch_of


def _load_decoder(
    directory: Path, plan: ModelPlan, share: _Share, packed_experts: PackedLayer | None, **options: Any
) -> StepDecoder:
    """Load a model by the code that its spec is for. options: see `moeserve.model.weights.load_decoder`."""
    options |= {"dtype": plan.dtype, "rounding": plan.rounding}
    if isinstance(plan.spec, DecoderSpec):
        return load_decoder(
            directory,
            plan.spec,
            packed_experts=packed_experts,
            forgets_files=plan.forgets_files,
            border=share.pipe,
            partners=share.partners,
            **options,
        )
    from moeserve.model.hf.loading import load_transformers_decoder  # Imported late: it loads modelling code.

    return load_transformers_decoder(directory, plan.spec, **options)


def _open_cpu_body(
    directory: Path,
    plan: ModelPlan,
    config: ServeConfig,
    report: Report,
    observers: Sequence[AnyObserver],
    share: _Share,
    num_packers: int | None,
) -> CpuBody:
    if config.reproducible and (kernels := native_kernels()) is not None and not kernels.sums_as_tiles:
        raise ConfigError("--reproducible: the kernels that MOESERVE_CPU_KERNELS names add in an order of their own.")
    if (absence := native_kernels_absence()) is not None:
        log.warning("cpu_kernels_not_compiled", reason=absence, consequence="torch computes, several times slower")
    resident = None
    if plan.residency is not None:
        resident = open_experts(directory, plan.spec, plan.residency, config, report, observers)
        slots = resident.slots
        log.info(
            "expert_memory",
            slots=f"{min(slots.num_slots)} of {experts_of(plan.spec).num_experts} per layer",
            size=in_mib(slots.num_bytes),
            policy=config.expert_policy,
            **resident.reads,
        )
    return CpuBody(plan, config, resident, num_packers, share.pipe, share.partners)


def _open_gpu_body(
    directory: Path,
    plan: ModelPlan,
    config: ServeConfig,
    report: Report,
    observers: Sequence[AnyObserver],
    share: _Share,
) -> Body:
    from moeserve.engine.gpu_body import GpuBody, gpu_expert_settings, gpu_settings  # Imported late: it loads Triton.

    collectives, shared = share.collectives, share.pipe or share.partners
    part = plan.spec if shared is None else shared.part
    states = state_demand(part, plan.dtype, config)
    settings = gpu_settings(config, states, keeps_stored=plan.rounding.keeps_stored)
    if not isinstance(plan.spec, DecoderSpec):
        return _open_transformers_body(directory, plan, settings, progress_to(report))
    body = GpuBody(
        directory,
        plan.spec,
        plan.dtype,
        plan.rounding,
        settings,
        gpu_expert_settings(directory, plan.spec, config),
        current_gpu() if collectives is None else collectives.device,
        observers,
        _progress(plan, report),
        progress_to(report),
        owned=share.owned,
        replays_with=None if collectives is None or shared is not None else config.dispatch,
        collectives=collectives,
        shared=shared,
    )
    if body.resident is not None:
        few, tier = min(body.resident.slots.num_slots), body.resident.tier
        log.info("expert_memory", slots=few, others_in=tier, policy=config.expert_policy, **body.resident.reads)
    is_first = collectives is not None and collectives.rank == 0
    if is_first and not (body.captured_sizes or settings.enforce_eager):
        all_there = body.resident is None
        log.info("decode_steps_not_captured", dispatch=config.dispatch, all_experts_in_memory=all_there)
    return body


def _open_transformers_body(directory: Path, plan: ModelPlan, settings: GpuSettings, told: StageProgress) -> Body:
    from moeserve.engine.gpu_transformers_body import TransformersGpuBody  # Imported late: both load modelling code.
    from moeserve.model.hf.spec import TransformersSpec

    assert isinstance(plan.spec, TransformersSpec)
    return TransformersGpuBody(directory, plan.spec, plan.dtype, plan.rounding, settings, current_gpu(), told)


def _make_group(config: ServeConfig, plan: ModelPlan, body: Body, collectives: Collectives) -> Group:
    from experts.parallel.dispatch import ExpertParallel  # Imported late: it loads deepspeed.

    spec = plan.spec
    assert plan.placement is not None
    experts: ExpertParallel[Any] = ExpertParallel(
        collectives,
        plan.placement,
        spec.moe_layers,
        last_layer=spec.num_layers - 1 if spec.last_layer_is_partial else -1,
        compute=body.compute_of(spec.moe_layers[0]),
        local_of=None if body.resident is None else body.compute_of,
        for_devices=plan.device == "cuda",
        combine_dtype=getattr(torch, config.combine_dtype),
    )
    return Group(collectives, experts, GroupSteps(experts, collectives))


def _progress(plan: ModelPlan, report: Report) -> Progress:
    stage = "loading weights onto the GPU"
    if plan.device == "cuda" and plan.rounding.keeps_stored:
        stage += f", kept as {plan.rounding.name}"
    if plan.device == "cpu":
        stage = f"loading {plan.weights_bytes / 2**30:.1f} GiB of weights for {str(plan.dtype).removeprefix('torch.')}"
        if plan.spec.quantization is not None and not plan.rounding.keeps_stored:
            stage += f", expanded from {plan.spec.quantization.kind}"
        if not plan.rounding.is_none:
            stage += f", {'kept as' if plan.rounding.keeps_stored else 'rounded to'} {plan.rounding.name}"
    return partial(progress_to(report), stage)


def arithmetic_of(plan: ModelPlan, config: ServeConfig) -> str:
    """Return how a rank multiplies, for people: `float32`, or with `products of bfloat16` or `weights int4, activations
    int8 within products` behind it."""
    name, rounding = str(plan.dtype).removeprefix("torch."), plan.rounding
    narrow = rounding.narrow and native_kernels() is not None
    if narrow:
        name += ", products of bfloat16"
    kept = config.kv_cache_dtype
    if plan.device == "cpu":
        kept = str(cpu_kv_dtype(config, plan.spec, plan.dtype, rounding)).removeprefix("torch.")
    if kept not in ("auto", str(plan.dtype).removeprefix("torch.")):
        name += f", keys and values {kept}"
    if config.reproducible:
        name += ", bits of every CPU"
    if rounding.is_none:
        return name
    if plan.device == "cuda":
        return f"{name}, weights {rounding.name}{', products of fp8' if rounding.fp8_products else ''}"
    activations = "int8 within products" if rounding.rounds_rows else "bfloat16 within products" if narrow else "exact"
    return f"{name}, weights {rounding.name}, activations {activations}"


class LoadedRank:
    """A rank with its weights. All ranks call `start` together before the first step.

    progress: counts the work of the rank's steps. collectives, group: as in `Rank`.
    """

    def __init__(
        self,
        directory: Path,
        plan: ModelPlan,
        config: ServeConfig,
        body: Body,
        decoder: StepDecoder,
        observers: list[AnyObserver],
        tap: RoutingTap | None,
        share: _Share,
        group: Group | None,
        kept: KeptExperts | None,
    ) -> None:
        self.collectives, self.group = share.collectives, group
        memory = None if body.resident is None else body.resident.memory
        self.progress = StepProgress(native_kernels() if plan.device == "cpu" else None, memory)
        self._kept, self._owned = kept, share.owned
        self._directory, self._plan, self._config, self._body = directory, plan, config, body
        self._decoder, self._observers, self._tap = decoder, observers, tap
        self._migrator: ExpertMigrator[Any] | None = None
        if group is not None and share.owned is not None and not plan.layers:
            self._migrator = self._make_migrator(group, share.owned)
        body.record_loaded()

    @gpu_faults_in_words()
    def start(self) -> Rank:
        """Allocate KV memory, warm up and complete the observers, together with all other ranks.

        Raise ConfigError if no memory is left for KV, and CollectiveError if another rank is lost.
        """
        config, group, body, plan = self._config, self.group, self._body, self._plan
        choice: ShapeChoice | None = None
        if group is not None:
            body.meet(self._decoder, group)
            choice = self._choose_shape(group)
            group.steps.use(choice, body.captured_sizes)
        defaults = load_generation_defaults(self._directory, parse_generation(config.override_generation_config))
        prepared = body.prepare(self._decoder, self._tap, group)
        if plan.device == "cuda" and group is None:
            state = StateUse(0) if plan.spec.state_layers else None
            check_first_answer(prepared.runner, plan.spec.vocab_size, config.block_size, state)
        if prepared.seconds:
            log.info("gpu_prepared", **prepared.seconds)
        if defaults.left_out:
            log.warning("sampling_defaults_left_out", values=list(defaults.left_out), file="generation_config.json")
        prefetcher = self._start_prefetching()
        self._observers.append(self.progress)
        self._end_warm_up()
        return Rank(
            ObservedRunner(prepared.runner, self._observers),
            self._served(defaults, prepared),
            body.depth,
            prepared.release,
            self.progress,
            memory=None if body.resident is None else body.resident.memory,
            prefetcher=prefetcher,
            collectives=self.collectives,
            group=group,
            migrator=self._migrator,
            dispatch=choice,
            kv_pool=prepared.kv_pool,
            state_pool=prepared.state_pool,
            warm_up=prepared.warm_up,
            expert_file=self._write_experts(),
            part=self._part_of_blocks(),
        )

    def _end_warm_up(self) -> None:
        """Forget the rows that ranks exchanged so far, and wait from now on for no longer than a step may take."""
        config, group = self._config, self.group
        if group is not None:
            group.experts.forget_counts()
            self._observers.append(SentCounter(group.experts.sent))
            group.collectives.be_patient(self._patience(group))
        if self.collectives is not None and config.tensor_parallel_size > 1:
            self.collectives.part_of(config.tensor_parallel_size).be_patient(collective_timeout(config))

    def _served(self, defaults: GenerationDefaults, prepared: Prepared) -> ServedModel:
        plan = self._plan
        return ServedModel(
            plan.spec,
            defaults,
            prepared.kv,
            plan.dtype,
            prepared.weights_bytes,
            prepared.kv_bytes,
            plan.device,
            state_row_bytes=prepared.state_row_bytes,
            arithmetic=arithmetic_of(plan, self._config),
            layers=plan.layers,
        )

    def _patience(self, group: Group) -> float:
        """Return the seconds that this rank waits for others of its group.

        In later stages a rank without rows waits there while an earlier stage computes those of another rank.
        """
        from experts.parallel.collectives import UNBOUNDED_SECONDS  # Imported late: it loads deepspeed.

        is_later = self.collectives is not None and self.collectives.rank >= group.collectives.num_ranks
        return UNBOUNDED_SECONDS if is_later else collective_timeout(self._config)

    def _part_of_blocks(self) -> tuple[int, int]:
        """See `Rank.part`."""
        config, number = self._config, 0 if self.collectives is None else self.collectives.rank
        shards = config.tensor_parallel_size
        stage = number // (config.expert_parallel_size * shards)
        return stage * shards + number % shards, config.pipeline_parallel_size * shards

    def _write_experts(self) -> ExpertFileWriter | None:
        """Begin to write the expert file if it is wanted and not mapped: in this process, which serves."""
        kept = self._kept
        return None if kept is None or kept.layer_of is not None else kept.write(self._decoder.experts)

    def memory_stats(self) -> ExpertMemoryStats | None:
        return None if self._body.resident is None else self._body.resident.memory.stats()

    def close(self) -> None:
        """Leave the group without a start."""
        if self._body.resident is not None:
            self._body.resident.memory.close()
        if self.collectives is not None:
            self.collectives.close()

    def _make_migrator(self, group: Group, owned: OwnedExperts) -> ExpertMigrator[Any]:
        """Make the migrator. owned: the experts that this rank holds before the first migration."""
        plan, body, experts = self._plan, self._body, self._decoder.experts
        reread = Rereader(
            lambda: stored_experts(self._directory, plan.spec, plan.dtype, plan.rounding), owned, body.take_expert
        )
        return ExpertMigrator(
            group.experts, reread, lambda layer, slot, taken: body.install_expert(experts[layer], slot, taken)
        )

    @torch.inference_mode()
    def _choose_shape(self, group: Group) -> ShapeChoice:
        """Return the shape of dispatch that the settings name; for `auto` measure which one is faster from how many
        rows on."""
        spec = self._plan.spec
        if self._config.dispatch != "auto":
            return ShapeChoice.always(self._config.dispatch)
        assert spec.moe is not None
        # Resident experts take no part: measuring would load experts from the tier below.
        here = self._decoder.experts if self._body.resident is None else ()
        top_k, activation = spec.moe.gate.top_k, spec.moe.activation
        max_rows = step_budget(self._config, group.collectives.device.type)
        seconds = group.experts.measure(
            spec.expert_hidden_size, top_k, self._plan.dtype, here, activation, max_rows=max_rows
        )
        choice = ShapeChoice.measured(seconds)
        if group.collectives.rank == 0:
            times = {
                f"{name}_{rows}_rows": f"{1000 * s:.2f} ms"
                for rows, of_shapes in seconds.items()
                for name, s in of_shapes.items()
            }
            log.info("dispatch_measured", took=str(choice), **times)
        return choice

    def _experts_here(self, place: int) -> Collection[int]:
        """Return the experts of a layer that this rank among several holds now. place: among layers with experts."""
        if self.group is not None:
            return self.group.experts.experts_here(place)
        assert self._owned is not None
        return self._owned(self._plan.spec.moe_layers[place])

    def _start_prefetching(self) -> PrefetchObserver | None:
        """Add the observers of prefetching; return the prefetcher. Forget the counts of the warm-up."""
        resident, config, spec = self._body.resident, self._config, self._plan.spec
        if resident is None:
            return None
        resident.memory.forget_counts()
        choice, here = config.expert_prefetch, None if self._owned is None else self._experts_here
        fitted = None
        try:
            fitted = find_fitted_gates(self._directory)
        except FittedGatesError as error:
            log.warning("fitted_gates_unusable", reason=str(error), consequence="the plain gates predict")
        prefetching = start_prefetching(choice, resident, self._decoder, here, fitted)
        if prefetching is None:
            if choice != "off":
                one = "the model has one layer with experts: no gate comes after it"
                unknown = "its gates cannot be asked ahead: --expert-prefetch affinity does without"
                log.info("no_expert_prefetch", reason=one if len(spec.moe_layers) == 1 else unknown)
            return None
        log.info("expert_prefetch", by=choice, gates_fitted=fitted is not None and choice != "gate")
        self._observers += prefetching.observers
        return prefetching.asks


def check_first_answer(runner: Runner, vocab_size: int, block_size: int, state: StateUse | None = None) -> None:
    """Compute a short fixed prompt in block 0, which no request may hold yet; raise CheckpointError if that fails.

    state: a slot that no request holds, None for a model without recurrent states. On a CPU the warm-up checks its own
    logits instead.
    """
    prompt = array("i", (token % vocab_size for token in range(min(_PROMPT_TOKENS, block_size))))
    chunk = Chunk("", prompt, 0, array("i", [0]), SamplingParams(max_tokens=1, temperature=0.0), state=state)
    # A stage that is not the last has no results.
    if any(one.error is not None for one in runner.launch(StepPlan(0, [chunk])).result().chunks):
        raise CheckpointError(NO_NUMBERS)


def collective_timeout(config: ServeConfig) -> float:
    """Return the seconds that ranks wait for each other.

    The supervisor waits longer for rank 0, which can thus name the late rank before it is ended.
    """
    return 0.4 * config.engine_timeout
