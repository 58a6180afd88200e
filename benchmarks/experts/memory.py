"""Models in this process with part of their experts in memory, behind a link of a chosen speed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import structlog
from tokenizers import Tokenizer

import moeserve.engine.experts.memory
from benchmarks.experts.figures import Amount, Figure, Progress, Unavailable, at_least, at_most, in_turn
from benchmarks.experts.traces import BUILDS, documents, folder_of
from benchmarks.token_engine import Completion, TokenEngine
from experts.memory.file import round_to_page
from experts.memory.tiers import DiskTier
from moeserve.config import ServeConfig
from moeserve.engine.experts.fit import TextReader, fit_gates, half_of_topics, pieces
from moeserve.engine.experts.prefetch import find_fitted_gates, keep_fitted_gates
from moeserve.engine.memory_plan import read_spec
from moeserve.model.expert_store import ExpertFile, layouts_in_store, stored_experts
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec, ModelError, silent
from moeserve.plan import SamplingParams

_PROMPT_TOKENS = 24
# Memory that is a file system: a disk may be slower than the link that is emulated.
_MEMORY = Path("/dev/shm")
_PREFETCHES = ("gate", "fitted")
_FITTED_TOKENS = 8192
_NUM_LOGPROBS = 20
# Steps before timed runs, and the most tokens in them. The prefetch switch decides by eight probes, one each 20 steps,
# after 14 steps, or later where they scatter.
_JUDGED_STEPS, _WARM_STEPS, _JUDGED_TOKENS = 320, 32, 2560
# The most steps and tokens of a timed run; a run of many streams scatters less.
_TIMED_STEPS, _TIMED_TOKENS = 32, 192


@dataclass(frozen=True, slots=True)
class Setting:
    """residency: share of the experts that the memory holds, whole slots per layer. bandwidth: of the emulated link, in
    bytes per second, None for the disk as it is. quantization: as `--quantization`."""

    folder: Path
    residency: float = 1.0
    policy: str = "lfru"
    prefetch: str = "off"
    bandwidth: int | None = None
    quantization: str = "none"


@dataclass(frozen=True, slots=True)
class Run:
    """seconds: of the whole run; stall, prediction: their part of it. wasted: share of all bytes moved. beta: as the
    copying thread and the computation have measured themselves; 0 where all experts are in memory."""

    num_tokens: int
    seconds: float
    stall: float = 0.0
    prediction: float = 0.0
    wasted: float = 0.0
    beta: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Contestant:
    """A loaded model that computes the same prompts in every run; only its experts stay in memory between two runs."""

    def __init__(self, setting: Setting, store: Path | None = None) -> None:
        """store: folder of the expert file, None for the usual one. Raise Unavailable if the model does not load."""
        config = ServeConfig(
            kv_cache_memory=2**28,
            max_model_len=512,
            enable_prefix_caching=False,
            expert_memory=_expert_memory(setting),
            expert_policy=setting.policy,
            expert_prefetch=setting.prefetch,
            quantization=setting.quantization,
            expert_store_dir=None if store is None or setting.bandwidth is None else str(store),
            threads=1,
        )
        try:
            if setting.bandwidth is not None:
                _write_expert_file(setting, config)
            with _emulated_link(setting.bandwidth):
                self._llm = TokenEngine(setting.folder, config)
        except ModelError as error:
            raise Unavailable(str(error)) from error
        # Whether a switch has to find out first that prefetching pays.
        self.is_judged = setting.prefetch == "auto"
        tokenizer = Tokenizer.from_file(str(setting.folder / "tokenizer.json"))
        self._prompts = [tokenizer.encode(text).ids[:_PROMPT_TOKENS] for text in documents()]

    @property
    def num_layers(self) -> int:
        return len(self._llm.spec.moe_layers)

    def complete(self, num_streams: int, num_tokens: int, num_logprobs: int | None = None) -> list[Completion]:
        """Decode greedily, all streams at once, `num_tokens` each."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=num_logprobs)
        return self._llm.generate(self._prompts[:num_streams], sampling)

    def run(self, num_streams: int, num_tokens: int, *, on_demand: bool = False) -> Run:
        """on_demand: load no experts ahead in this run."""
        memory = self._llm.experts
        if memory is not None:
            memory.forget_counts()
        started = time.perf_counter()
        with self._llm.without_prefetching() if on_demand else nullcontext():
            self.complete(num_streams, num_tokens)
        seconds = time.perf_counter() - started
        if memory is None:
            return Run(num_streams * num_tokens, seconds)
        stats = memory.stats()
        counters = stats.counters
        moved = counters.demand_bytes + counters.prefetch_bytes
        wasted = (counters.wasted_bytes + counters.cancelled_bytes) / max(moved, 1)
        return Run(
            num_streams * num_tokens,
            seconds,
            stats.stall_seconds,
            stats.predictor_seconds,
            wasted,
            1 / memory.loads_per_layer(),
        )

    def close(self) -> None:
        self._llm.close()


def _write_expert_file(setting: Setting, config: ServeConfig) -> None:
    """Write the expert file before a start: until it is there, experts come out of the checkpoint and not by the link.

    Raise ModelError.
    """
    spec, dtype = read_spec(setting.folder, config)
    assert spec.moe is not None
    rounding = Rounding.named(config.quantization, config.arithmetic)
    stored = stored_experts(setting.folder, spec, dtype, rounding)
    layouts = layouts_in_store(setting.folder, spec, dtype, rounding)
    root = None if config.expert_store_dir is None else Path(config.expert_store_dir)
    ExpertFile(setting.folder, stored, spec.moe.num_experts, layouts, root).ensure(silent)


@contextmanager
def contest(settings: Sequence[Setting]) -> Iterator[list[Contestant]]:
    """Load all settings at once. Raise Unavailable."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    contestants: list[Contestant] = []
    store = _store_in_memory(settings)
    try:
        for setting in settings:
            contestants.append(Contestant(setting, store))
        yield contestants
    finally:
        if store is not None:
            shutil.rmtree(store, ignore_errors=True)
        for contestant in contestants:
            contestant.close()
        structlog.reset_defaults()


class SlowedTier(DiskTier):
    """An expert file behind an emulated link: a token bucket of one piece delays the reader."""

    def __init__(self, bytes_per_second: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        started = time.monotonic()
        self._free_at = max(self._free_at, started) + len(out) / self._bytes_per_second
        super().read(layer, expert, offset, out)
        time.sleep(max(0.0, self._free_at - time.monotonic()))


@contextmanager
def _emulated_link(bandwidth: int | None) -> Iterator[None]:
    """Let the service's code, while it loads a model, open expert files behind a link of limited bytes per second."""
    if bandwidth is None:
        yield
        return
    rate = float(bandwidth)

    class Link(SlowedTier):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(rate, *arguments)

    with patch.object(moeserve.engine.experts.memory, "DiskTier", Link):
        yield


def layer_seconds(folder: Path, num_tokens: int = 16) -> float:
    """Return how long a layer of one stream takes with all experts in memory."""
    with contest([Setting(folder)]) as (resident,):
        resident.complete(1, 4)
        seconds = median(resident.run(1, num_tokens).seconds / num_tokens for _ in range(3))
        return seconds / resident.num_layers


def bandwidth_for(folder: Path, beta: float, layer_s: float) -> int:
    """Return bytes per second of a link on which an expert takes `beta` times as long as `layer_s`."""
    return round(slot_bytes(folder) / (beta * layer_s))


def slot_bytes(folder: Path, quantization: str = "none") -> int:
    spec, dtype = read_spec(folder, ServeConfig())
    assert isinstance(spec, DecoderSpec)
    rounding = Rounding.named(quantization, "auto")
    return round_to_page(layouts_in_store(folder, spec, dtype, rounding).num_bytes)


def _store_in_memory(settings: Sequence[Setting]) -> Path | None:
    """Make a folder for the expert files behind emulated links; None if there are none, or no room for them."""
    files = {(setting.folder, setting.quantization): setting for setting in settings if setting.bandwidth is not None}
    if not files or not _MEMORY.is_dir():
        return None
    num_bytes = 0
    for setting in files.values():
        spec, _ = read_spec(setting.folder, ServeConfig())
        assert spec.moe is not None
        num_bytes += len(spec.moe_layers) * spec.moe.num_experts * slot_bytes(setting.folder, setting.quantization)
    if shutil.disk_usage(_MEMORY).free < 2 * num_bytes:
        return None
    return Path(mkdtemp(prefix="moeserve-bench-", dir=_MEMORY))


def _expert_memory(setting: Setting) -> int | None:
    if setting.residency == 1:
        return None
    spec, _ = read_spec(setting.folder, ServeConfig())
    assert spec.moe is not None
    slots = max(round(setting.residency * spec.moe.num_experts), spec.moe.gate.top_k)
    return slots * len(spec.moe_layers) * slot_bytes(setting.folder, setting.quantization)


def stall(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Exposed stall that prefetching saves, with the real copying thread behind an emulated link."""
    build = BUILDS[0]
    folder = folder_of(build, amount, progress)
    with _fitted_gates(folder, progress):
        layer_s = layer_seconds(folder)
        for beta in (1.0,) if amount.quick else (0.5, 1.0, 2.0):
            progress(f"{build.name}, beta {beta:g}")
            rounds = _stall_rounds(folder, bandwidth_for(folder, beta, layer_s), amount)
            for arm, prefetch in enumerate(_PREFETCHES, start=1):
                case = f"{build.name}, emulated link, {prefetch}"
                yield from stall_figures(case, [(of_round[0], of_round[arm]) for of_round in rounds])


def _stall_rounds(folder: Path, bandwidth: int, amount: Amount) -> list[tuple[Run, ...]]:
    """Return rounds of one run on demand and one per kind of prefetch."""
    arms = [Setting(folder, 0.5, "lfru", prefetch, bandwidth) for prefetch in ("off", *_PREFETCHES)]
    with contest(arms) as contestants:
        for contestant in contestants:
            contestant.run(1, amount.of(64, 12))
        return in_turn(contestants, amount.num_pairs, lambda arm, _: arm.run(1, amount.of(64, 16)))


@contextmanager
def _fitted_gates(folder: Path, progress: Progress) -> Iterator[None]:
    """Fit gates as `moeserve experts fit` does, to other text than is measured.

    They are removed at the end if they were not there before: services would use them.
    """
    if find_fitted_gates(folder) is not None:
        yield
        return
    progress("fitting gates")
    reader = TextReader(folder)
    path = keep_fitted_gates(folder, fit_gates(reader, pieces(reader, half_of_topics(0), _FITTED_TOKENS)))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def stall_figures(case: str, rounds: Sequence[tuple[Run, Run]]) -> Iterator[Figure]:
    """rounds: (on demand, prefetching)."""
    saved = tuple(1 - (ahead.stall + ahead.prediction) / demand.stall for demand, ahead in rounds)
    wasted = tuple(ahead.wasted for _, ahead in rounds)
    demanded = fmean(demand.stall / demand.num_tokens for demand, _ in rounds)
    stalled = fmean(ahead.stall / ahead.num_tokens for _, ahead in rounds)
    predicted = fmean(ahead.prediction / ahead.num_tokens for _, ahead in rounds)
    note = (
        f"beta {fmean(demand.beta for demand, _ in rounds):.2f}; per token {demanded * 1e3:.1f} ms of stall, with "
        f"prefetches {stalled * 1e3:.1f} ms and {predicted * 1e3:.1f} ms of prediction"
    )
    name = f"{case}, stall saved, prediction counted"
    yield Figure(name, "demand loads alone, LFRU", saved, "%", at_least(0.40), note=note)
    yield Figure(f"{case}, bytes moved for nothing", "all bytes moved", wasted, "%", at_most(0.25))


def throughput(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Tokens/s with prefetching, against demand loads alone and against all experts in memory.

    beta: of float32 experts; over the same link packed ones load as much sooner as they are smaller. All models of a
    beta are loaded once and take turns in each round, so one run with all experts in memory serves all residencies. One
    model loads on demand and with prefetching: two equal models differ by up to 4 %, by the pages that they got.
    """
    build = BUILDS[-1]
    folder = folder_of(build, amount, progress)
    layer_s = layer_seconds(folder)
    tables = [((0.5,), 1.0)] if amount.quick else [((0.25, 0.5), 1.0), ((0.5,), 0.5), ((0.5,), 2.5)]
    forms = ("experts=int8",) if amount.quick else ("none", "experts=int8")
    for quantization, (residencies, beta) in product(forms, tables):
        kind = "float32" if quantization == "none" else "int8"
        bandwidth = bandwidth_for(folder, beta, layer_s)
        arms = [
            Setting(folder, quantization=quantization),
            *(Setting(folder, residency, "lfru", "auto", bandwidth, quantization) for residency in residencies),
        ]
        with contest(arms) as contestants:
            for num_streams in (1, 4) if amount.quick or beta != 1.0 else (1, 4, 16):
                progress(f"{build.name}, {kind}, beta {beta:g}, {num_streams} at once")
                rounds = _throughput_rounds(contestants, num_streams, amount)
                for place, residency in enumerate(residencies):
                    case = f"{build.name}, {kind}, {residency:.0%} resident, beta {beta:g}, {num_streams} at once"
                    first = 1 + 2 * place
                    yield throughput_figure(case, [(of[0], of[first], of[first + 1]) for of in rounds])


def _throughput_rounds(contestants: Sequence[Contestant], num_streams: int, amount: Amount) -> list[tuple[Run, ...]]:
    """Return rounds of one run with all experts in memory, and for each other contestant one on demand and one with
    prefetching."""
    resident, *bounded = contestants
    for contestant in contestants:
        num_judged = min(_JUDGED_STEPS, _JUDGED_TOKENS // num_streams)
        contestant.run(num_streams, amount.of(num_judged if contestant.is_judged else _WARM_STEPS, 12))
    num_steps = amount.of(min(_TIMED_STEPS, _TIMED_TOKENS // num_streams), 12)
    arms = [(resident, False), *((contestant, on_demand) for contestant in bounded for on_demand in (True, False))]
    return in_turn(arms, amount.num_pairs, lambda arm, _: arm[0].run(num_streams, num_steps, on_demand=arm[1]))


def throughput_figure(case: str, rounds: Sequence[tuple[Run, ...]]) -> Figure:
    """rounds: (all experts in memory, demand loads, the service's defaults)."""
    ratios = tuple(ahead.tokens_per_second / demand.tokens_per_second for _, demand, ahead in rounds)
    resident, demand, ahead = (median(run.tokens_per_second for run in runs) for runs in zip(*rounds, strict=True))
    stalls = [1e3 * fmean(run.stall / run.num_tokens for run in runs) for runs in zip(*rounds, strict=True)][1:]
    note = (
        f"median {median(ratios):.3f}; {resident:.1f} tokens/s with all experts in memory, {demand:.1f} on demand "
        f"({demand / resident:.2f}), {ahead:.1f} ({ahead / resident:.2f}); {stalls[0]:.1f} and {stalls[1]:.1f} ms of "
        f"stall per token; beta measured {median(of_round[1].beta for of_round in rounds):.2f}"
    )
    return Figure(f"{case}, tokens/s", "demand loads alone", ratios, "x", at_least(0.99), note=note)


def exactness(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Tokens and logprobs float for float, of one stream and of several together."""
    progress("memory")
    folder = folder_of(BUILDS[0], amount, progress)
    bounded = [Setting(folder, 0.25, "lru", "off"), Setting(folder, 0.5, "lfru", "gate")]
    if not amount.quick:
        bounded += [Setting(folder, 0.75, "lfu", "auto"), Setting(folder, 0.5, "affinity", "affinity")]
    num_tokens = amount.of(48, 12)
    with contest([Setting(folder)]) as (resident,):
        expected = _answers(resident, num_tokens)
    shares = []
    for setting in bounded:
        with contest([setting]) as (contestant,):
            found = _answers(contestant, num_tokens)
        same = [
            one.token_ids == other.token_ids and one.logprobs == other.logprobs
            for one, other in zip(found, expected, strict=True)
        ]
        shares.append(sum(same) / len(same))
    note = "; ".join(f"{setting.residency:.0%} {setting.policy}, prefetch {setting.prefetch}" for setting in bounded)
    name = f"{BUILDS[0].name}, answers with the same tokens and logprobs, bit for bit"
    yield Figure(name, "all experts in memory", tuple(shares), "%", at_least(1), exact=True, note=note)


def _answers(contestant: Contestant, num_tokens: int) -> list[Completion]:
    """Answer one stream, then several together, so that batches are small and large."""
    return [answer for count in (1, 6) for answer in contestant.complete(count, num_tokens, _NUM_LOGPROBS)]
