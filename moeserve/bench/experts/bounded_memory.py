"""Models in this process with part of their experts in memory, behind a link of a chosen speed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import structlog
from tokenizers import Tokenizer

from experts.expert_file import round_to_page
from moeserve.bench.experts.texts import documents
from moeserve.bench.experts.unavailable import Unavailable
from moeserve.config import ServeConfig
from moeserve.llm import LLM, Completion
from moeserve.memory_plan import read_spec
from moeserve.model.expert_store import layout_in_store
from moeserve.model.spec import ModelError
from moeserve.plan import SamplingParams

_PROMPT_TOKENS = 24
# Memory that is a file system: a disk may be slower than the link that is emulated.
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Setting:
    """residency: share of the experts that the memory holds, whole slots per layer. bandwidth: of the emulated link, in
    bytes per second, None for the disk as it is."""

    folder: Path
    residency: float = 1.0
    policy: str = "lfru"
    prefetch: str = "off"
    bandwidth: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """seconds: of all. stall, prediction: seconds of these. wasted: share of all bytes moved. beta: as the copying
    thread and the computation have measured themselves; 0 where all experts are in memory."""

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
    """A loaded model that computes the same prompts again and again; nothing is kept between two runs but its
    experts."""

    def __init__(self, setting: Setting, store: Path | None = None) -> None:
        """store: where the expert file is kept, None for the usual place. Raises Unavailable if it cannot be loaded."""
        config = ServeConfig(
            kv_cache_memory=2**28,
            max_model_len=512,
            enable_prefix_caching=False,
            expert_memory=_expert_memory(setting),
            expert_policy=setting.policy,
            expert_prefetch=setting.prefetch,
            expert_store_bandwidth=setting.bandwidth,
            expert_store_dir=None if store is None or setting.bandwidth is None else str(store),
            threads=1,
        )
        try:
            self._llm = LLM(setting.folder, config)
        except ModelError as error:
            raise Unavailable(str(error)) from error
        tokenizer = Tokenizer.from_file(str(setting.folder / "tokenizer.json"))
        self._prompts = [tokenizer.encode(text).ids[:_PROMPT_TOKENS] for text in documents()]

    @property
    def num_layers(self) -> int:
        return len(self._llm.spec.moe_layers)

    def complete(self, num_streams: int, num_tokens: int, num_logprobs: int | None = None) -> list[Completion]:
        """Greedy, all streams at once, all tokens asked for."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=num_logprobs)
        return self._llm.generate(self._prompts[:num_streams], sampling)

    def run(self, num_streams: int, num_tokens: int) -> Run:
        memory = self._llm.experts
        if memory is not None:
            memory.forget_counts()
        started = time.perf_counter()
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


@contextmanager
def contest(settings: Sequence[Setting]) -> Iterator[list[Contestant]]:
    """The settings, all loaded at once. Raises Unavailable."""
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


def in_turn(
    contestants: Sequence[Contestant], num_pairs: int, run: Callable[[Contestant], Run]
) -> list[tuple[Run, ...]]:
    """One run of each, `num_pairs` times; who begins changes, so that none is always first. In the order given."""
    rounds = []
    for number in range(num_pairs):
        order = range(len(contestants)) if number % 2 == 0 else range(len(contestants) - 1, -1, -1)
        runs = {index: run(contestants[index]) for index in order}
        rounds.append(tuple(runs[index] for index in range(len(contestants))))
    return rounds


def bandwidth_for(folder: Path, beta: float, num_tokens: int = 16) -> int:
    """Bytes per second of a link on which one expert takes `beta` times as long as a layer of a single stream."""
    with contest([Setting(folder)]) as (resident,):
        resident.complete(1, 4)
        seconds = median(resident.run(1, num_tokens).seconds / num_tokens for _ in range(3))
        return round(slot_bytes(folder) / (beta * seconds / resident.num_layers))


def slot_bytes(folder: Path) -> int:
    return round_to_page(layout_in_store(folder, *read_spec(folder, ServeConfig())).num_bytes)


def _store_in_memory(settings: Sequence[Setting]) -> Path | None:
    """A new folder for the expert files behind emulated links; None if there are none, or no room for them."""
    folders = {setting.folder for setting in settings if setting.bandwidth is not None}
    if not folders or not _MEMORY.is_dir():
        return None
    num_bytes = 0
    for folder in folders:
        spec, _ = read_spec(folder, ServeConfig())
        assert spec.moe is not None
        num_bytes += len(spec.moe_layers) * spec.moe.num_experts * slot_bytes(folder)
    if shutil.disk_usage(_MEMORY).free < 2 * num_bytes:
        return None
    return Path(mkdtemp(prefix="moeserve-bench-", dir=_MEMORY))


def _expert_memory(setting: Setting) -> int | None:
    if setting.residency == 1:
        return None
    spec, _ = read_spec(setting.folder, ServeConfig())
    assert spec.moe is not None
    slots = max(round(setting.residency * spec.moe.num_experts), spec.moe.gate.top_k)
    return slots * len(spec.moe_layers) * slot_bytes(setting.folder)
