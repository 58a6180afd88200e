"""From a run context to a serving engine: which device, weights and KV memory, then the service over them."""

from __future__ import annotations

import threading
from pathlib import Path

from experts.errors import ExpertStoreError
from experts.predictors import RankShare
from experts.prefetcher import PrefixListener
from experts.routing_tap import RoutingTap
from moeserve.config import ServeConfig
from moeserve.device import choose_device, cuda_absence
from moeserve.experts.load_ahead import load_ahead
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, PrefixSigner, plan_recording, routing_shape, signs_prefixes
from moeserve.experts.prefetch import PrefetchSteps
from moeserve.model.spec import DecoderSpec, ModelError
from moeserve.model_loading import LoadedModel, ModelPlan, Report, load_model, plan_model
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
    prefetcher = start_observing(directory, model, tap, config, records=config.record_experts)
    memory = None if model.experts is None else model.experts.memory
    sources = ExpertSources(
        memory=None if memory is None else lambda: [memory.stats()],
        prefetches=prefetcher is not None,
        strategy=None if memory is None else lambda: expert_strategy(config, prefetcher),
    )
    executor = LocalExecutor(Rank(model.runner, model.observers))
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
    return make_tap(spec)


def signature_tap(plan: ModelPlan, config: ServeConfig) -> RoutingTap | None:
    """What hears the gates where cached prefixes are kept with a signature of the experts that they use."""
    moe = plan.spec.moe
    if moe is None or plan.residency is None or not signs_prefixes(config):
        return None
    return make_tap(plan.spec)


def start_observing(
    directory: Path,
    model: LoadedModel,
    tap: RoutingTap | None,
    config: ServeConfig,
    *,
    records: bool,
    share: RankShare | None = None,
) -> PrefixListener | None:
    """Completes the observers of a warm model before its first step. Returns who loads ahead, if somebody does.

    records: whether results carry the routing. share: of a rank of several. The prefetcher asks the decoder's gates,
    the decoder has the experts, and these have the observers: so the list comes first, and the prefetcher into it last.
    """
    if model.experts is None or model.decoder is None:
        return None
    prefetcher = load_ahead(directory, config.expert_prefetch, model.experts, model.decoder, share)
    shape = routing_shape(model.spec)
    if prefetcher is not None:
        model.observers.extend([PrefetchSteps(prefetcher), prefetcher])
        if tap is not None and shape is not None and config.enable_prefix_caching:
            model.observers.append(PrefixSigner(shape, config.block_size, keeps_routing=records))
    return prefetcher


def make_tap(spec: DecoderSpec) -> RoutingTap:
    """For a model with experts."""
    assert spec.moe is not None
    return RoutingTap(len(spec.moe_layers), spec.moe.num_experts)
