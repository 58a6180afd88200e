"""The scheduler of a service, its parts and its prefix caches, by the settings and the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget, step_budget
from moeserve.engine.prompt_watch import PromptWatch
from moeserve.grammars.made_masks import MaskMaker
from moeserve.scheduling.cold_requests import ColdRequests
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.grammars import Drafts, Grammars
from moeserve.scheduling.led_requests import LedRequests
from moeserve.scheduling.pacing import Pace, service_slo
from moeserve.scheduling.parts import Part
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.thought_budgets import ThoughtBudgets
from moeserve.scheduling.tool_waits import ToolWaits
from moeserve.scheduling.trials import Trial
from moeserve.scheduling.turns import Turns
from moeserve.settings.drafts import parse_speculative
from radix_cache import PrefixCache, Shares, StoredBlocks


def build_caches(config: ServeConfig, kv: KvBudget, *, stored: StoredBlocks | None = None) -> list[PrefixCache]:
    """Return the prefix caches, one per rank.

    stored: the blocks in the lower tier, of all ranks; None without one.
    """
    num_slots = kv.num_state_slots
    return [
        PrefixCache(
            kv.num_blocks,
            config.block_size,
            caching=config.enable_prefix_caching,
            shares=Shares(config.cache_retention_share, config.cache_pin_share),
            snapshot_rows=range(num_slots, kv.num_state_rows) if num_slots else None,
            num_window_blocks=kv.num_window_blocks,
            window=kv.window,
            stored=stored,
        )
        for _ in range(config.expert_parallel_size)
    ]


def build_pace(config: ServeConfig, device: str, warm_up: Sequence[tuple[int, float]]) -> Pace:
    """Return the pace of a service's steps. warm_up: tokens and seconds of steps before the first request."""
    budget = step_budget(config, device)
    return Pace(service_slo(config), budget, config.max_num_seqs, config.expert_parallel_size, warm_up)


def build_parts(
    caches: Sequence[PrefixCache],
    suspects_until: Callable[[str], int],
    pace: Pace,
    sources: Sequence[Part] = (),
    text_parts: Sequence[Part] = (),
    num_stages: int = 1,
) -> list[Part]:
    """Return the parts of a service's scheduler, in their order.

    suspects_until: see `Trial`. sources: of KV beside memory, other services before the tier below memory. text_parts:
    see `build_text_parts`. num_stages: the ranks that share the layers.
    """
    turns = [Turns(num_stages)] if num_stages > 1 else []
    holding = [Trial(suspects_until), LedRequests(), *turns, *text_parts]
    return [ColdRequests(), *sources, *holding, ToolWaits(caches), PromptWatch(pace)]


def build_text_parts(masks: MaskMaker, drafts: Drafts) -> list[Part]:
    """Return the parts that say how texts go on, in their order."""
    return [ThoughtBudgets(), drafts, Grammars(masks, drafts)]


def build_scheduler(
    config: ServeConfig,
    kv: KvBudget,
    caches: Sequence[PrefixCache],
    device: str = "cpu",
    *,
    depth: int = 0,
    pace: Pace | None = None,
    parts: Sequence[Part] = (),
) -> Scheduler:
    """Return the scheduler over the caches of all ranks. Raise ConfigError for contradicting limits.

    depth: see `Steps`. pace: see `Scheduler`; it then needs `Scheduler.set_time`. parts: see `Scheduler`.
    """
    budget = step_budget(config, device)
    if budget < config.max_num_seqs:
        raise ConfigError(f"--max-num-batched-tokens {budget} is below --max-num-seqs {config.max_num_seqs}.")
    num_slots = kv.num_state_slots
    return Scheduler(
        caches,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_model_len=kv.max_model_len,
        run_ahead=_runs_ahead(config, depth),
        states=StatePolicy(num_slots) if num_slots else None,
        pace=pace,
        parts=parts,
    )


def _runs_ahead(config: ServeConfig, depth: int) -> bool:
    """Return whether steps name requests whose last token is not known yet. Steps of ranks that share the layers name
    other requests. depth: see `Steps`."""
    return depth > 0 and config.pipeline_parallel_size == 1


def build_drafts(config: ServeConfig, kv: KvBudget, depth: int = 0) -> Drafts:
    """Return the part that makes draft tokens, or none of them. Raise ConfigError if they were never tried there.

    `auto` makes none where nothing was measured: where steps are planned ahead. depth: see `Steps`.
    """
    speculative, run_ahead = parse_speculative(config.speculative_config), _runs_ahead(config, depth)
    if speculative.method == "none" or (speculative.method == "auto" and run_ahead):
        return Drafts()
    if kv.num_state_slots and run_ahead:
        raise ConfigError("--speculative-config: models with recurrent states get draft tokens on a CPU alone.")
    return Drafting(speculative)
