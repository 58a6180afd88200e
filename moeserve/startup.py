"""From a run context to a serving engine: which device, weights and KV memory, then the service over them."""

from __future__ import annotations

import threading
from pathlib import Path

from experts.errors import ExpertStoreError
from experts.observer import RoutingTap, StepObserver
from moeserve.config import ServeConfig
from moeserve.device import choose_device, cuda_absence
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, PrefixSigner, plan_recording, routing_shape, signs_prefixes
from moeserve.experts.prefetch import PrefetchSteps
from moeserve.model.spec import DecoderSpec, ModelError
from moeserve.model_loading import LoadedModel, ModelPlan, Report, load_model, plan_model
from moeserve.plan import StepPlan, StepResult
from moeserve.rank import Rank
from moeserve.serving import serve
from moeserve.steps import LocalExecutor
from moeserve.wire import RunContext


def run_engine(context: RunContext, report: Report, stop: threading.Event) -> None:
    """Loads the model, tells `report` of progress and readiness, and serves until `stop` is set.

    Raises ModelError or ConfigError, one sentence each, for what cannot be served, or no longer.
    """
    try:
        if choose_device(context.config, cuda_absence) == "cuda":
            from moeserve.gpu_service import run_on_gpu  # Triton is loaded where it is used.

            run_on_gpu(context, report, stop)
        else:
            _run_on_cpu(context, report, stop)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error


def _run_on_cpu(context: RunContext, report: Report, stop: threading.Event) -> None:
    directory, config = Path(context.model_dir), context.config
    plan = plan_model(directory, config)
    recording = plan_recording(config, directory, plan.spec)
    tap = routing_tap(plan.spec, config) or signature_tap(plan, config)
    model = load_model(directory, config, report, plan=plan, tap=tap)
    memory = None if model.experts is None else model.experts.memory
    sources = ExpertSources(
        memory=None if memory is None else lambda: [memory.stats()],
        prefetches=model.prefetcher is not None,
        strategy=None if memory is None else lambda: expert_strategy(config, model.prefetcher),
    )
    executor = LocalExecutor(Rank(model.runner, rank_observers(model, tap, config, records=config.record_experts)))
    recorded = None if recording is None else ExpertRecording(recording)
    try:
        serve(context, model, executor, report, stop, recorded, sources, depth=0)
    finally:
        if memory is not None:
            memory.close()


def routing_tap(spec: DecoderSpec, config: ServeConfig) -> RoutingTap | None:
    """What hears the gates of this process, if routing is recorded."""
    if spec.moe is None or not config.record_experts:
        return None
    return RoutingTap(spec.moe_layers, spec.moe.num_experts)


def signature_tap(plan: ModelPlan, config: ServeConfig) -> RoutingTap | None:
    """What hears the gates where cached prefixes are kept with a signature of the experts that they use."""
    moe = plan.spec.moe
    if moe is None or plan.residency is None or not signs_prefixes(config):
        return None
    return RoutingTap(plan.spec.moe_layers, moe.num_experts)


def rank_observers(
    model: LoadedModel, tap: RoutingTap | None, config: ServeConfig, *, records: bool
) -> list[StepObserver[StepPlan, StepResult]]:
    """Who observes the steps of a rank on a CPU. records: whether results carry the routing."""
    if model.prefetcher is None:
        return []
    shape = routing_shape(model.spec)
    if tap is None or shape is None or not config.enable_prefix_caching:
        return [PrefetchSteps(model.prefetcher)]
    return [PrefetchSteps(model.prefetcher), PrefixSigner(shape, config.block_size, keeps_routing=records)]
