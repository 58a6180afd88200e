"""One rank: its runner, the observers of its steps, its model, and its place in a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experts.observer import StepObserver
from moeserve.device import KvBudget
from moeserve.model.spec import DecoderSpec
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.scheduling.steps import Runner, abandoned_if_it_fails
from radix_cache import Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from experts.memory.memory import ExpertMemory
    from experts.memory.residency import ExpertMemoryStats
    from experts.parallel.collectives import Collectives
    from experts.parallel.dispatch import ExpertParallel
    from experts.placement.rebalance import ExpertMigrator
    from experts.prediction.prefetcher import PrefetchObserver
    from kernels.cpu.library import NativeKernels
    from moeserve.engine.experts.kept import ExpertFileWriter
    from moeserve.engine.ranks.together import GroupSteps, ShapeChoice, StepRows
    from moeserve.model.generation import GenerationDefaults
    from moeserve.model.kv_pool import KVPool
    from moeserve.model.spec import ModelSpec
    from moeserve.model.state_pool import StatePool

Observers = Sequence[StepObserver[StepPlan, StepResult]]


class StepProgress(StepObserver[StepPlan, StepResult]):
    """Counts the work of a rank, within a step too: the count distinguishes a long step from a rank that hangs.

    Layers, parts of the work of compiled kernels, and copied pieces of experts count. Any thread may ask.
    """

    def __init__(self, kernels: NativeKernels | None, memory: ExpertMemory | None) -> None:
        self._num_observed = 0
        self._kernels, self._memory = kernels, memory

    def begin(self, plan: StepPlan) -> None:
        self._num_observed += 1

    def passed(self) -> None:
        self._num_observed += 1

    def launched(self) -> None:
        self._num_observed += 1

    def end(self, plan: StepPlan, result: StepResult) -> None:
        self._num_observed += 1

    def count(self) -> int:
        """Return the count, which never goes back."""
        kernels, memory = self._kernels, self._memory
        num_parts = 0 if kernels is None else kernels.progress
        return self._num_observed + num_parts + (0 if memory is None else memory.num_pieces)


class ObservedRunner:
    """A runner that reports every step to observers, in their order."""

    def __init__(self, runner: Runner, observers: Observers = ()) -> None:
        self._runner = runner
        self.observers = observers

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        begun: list[StepObserver[StepPlan, StepResult]] = []
        with abandoned_if_it_fails(plan, begun):
            for observer in self.observers:
                begun.append(observer)
                observer.begin(plan)
            step = self._runner.launch(plan)
            for observer in self.observers:
                observer.launched()
        return _ObservedStep(plan, step, self.observers)


@dataclass(frozen=True, slots=True)
class _ObservedStep:
    plan: StepPlan
    step: Pending[StepResult]
    observers: Observers

    @property
    def done(self) -> bool:
        return self.step.done

    def result(self) -> StepResult:
        left = list(self.observers)
        with abandoned_if_it_fails(self.plan, left):
            result = self.step.result()
            while left:
                left.pop(0).end(self.plan, result)
        return result


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The facts about a loaded model that the engine needs. weights_bytes: of all ranks. kv_bytes: of the blocks of one
    scheduler, on this rank or, where ranks share layers, on all.
    state_row_bytes: of one recurrent state, 0 without recurrent layers. arithmetic: see `EngineReady`. layers: see
    `Setup`."""

    spec: ModelSpec
    defaults: GenerationDefaults
    kv: KvBudget
    dtype: torch.dtype
    weights_bytes: int
    kv_bytes: int
    device: str
    state_row_bytes: int = 0
    arithmetic: str = ""
    layers: tuple[int, ...] = ()

    @property
    def eos_token_ids(self) -> list[int]:
        return eos_token_ids(self.defaults, self.spec)

    @property
    def short_context(self) -> int | None:
        """The longest context without stretched positions, where some have them (`RopeSpec.short_context`). A model on
        transformers' code has no longer ones."""
        return self.spec.rope.short_context if isinstance(self.spec, DecoderSpec) else None

    @property
    def is_stretched(self) -> bool:
        """True if the service takes contexts for which positions are stretched."""
        return self.short_context is not None and self.kv.max_model_len > self.short_context


def eos_token_ids(defaults: GenerationDefaults, spec: ModelSpec) -> list[int]:
    """Return the ids of the generation config, else of the model, without ids beyond the vocabulary."""
    named = defaults.eos_token_ids or spec.eos_token_ids
    return [token for token in named if 0 <= token < spec.vocab_size]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A runner that is ready for any step, with the sizes of its KV memory and of one recurrent state.

    weights_bytes: of all ranks. release: frees the group's resources that the runner holds; called before leaving the
    group. kv_pool, state_pool: the memory of KV and of recurrent states, None if only the runner may touch it. warm_up:
    see `ModelRunner.warm_up`. seconds: what each part of the start took, for the log.
    """

    runner: Runner
    kv: KvBudget
    kv_bytes: int
    weights_bytes: int
    release: Callable[[], None]
    state_row_bytes: int = 0
    kv_pool: KVPool | None = None
    state_pool: StatePool | None = None
    warm_up: Sequence[tuple[int, float]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's connection to ranks that share the experts with it. collectives: carry rows. experts: dispatch. steps:
    begin each step."""

    collectives: Collectives
    experts: ExpertParallel[Any]
    steps: GroupSteps


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank ready for its first step.

    depth: see `Steps`. progress: of this rank, in steps too. memory: the expert memory, None if all
    experts stay in memory. prefetcher: None if no experts are loaded ahead. collectives: None on a single rank. group,
    migrator, dispatch: None unless ranks share the experts. kv_pool, state_pool, warm_up: see `Prepared`. expert_file:
    its writer, None where none is written beside the steps of a model with all experts in memory. part: the number of
    this rank's part of every block, and that of all parts.
    """

    runner: ObservedRunner
    model: ServedModel
    depth: int
    release: Callable[[], None]
    progress: StepProgress
    memory: ExpertMemory | None = None
    prefetcher: PrefetchObserver | None = None
    collectives: Collectives | None = None
    group: Group | None = None
    migrator: ExpertMigrator[Any] | None = None
    dispatch: ShapeChoice | None = None
    kv_pool: KVPool | None = None
    state_pool: StatePool | None = None
    warm_up: Sequence[tuple[int, float]] = ()
    expert_file: ExpertFileWriter | None = None
    part: tuple[int, int] = (0, 1)

    def block_tensors(self) -> Mapping[Kind, Sequence[Tensor]]:
        """Return the memories of KV blocks and, where there are some, of window blocks and states."""
        assert self.kv_pool is not None
        memories = {Kind.KV: self.kv_pool.block_bytes()}
        if windows := self.kv_pool.window_bytes():
            memories[Kind.WINDOW] = windows
        if self.state_pool is not None:
            memories[Kind.STATE] = [self.state_pool.row_bytes()]
        return memories

    def begin_step(self, rows: StepRows) -> None:
        """Prepare the exchange of rows, if there is one, for the step that all ranks launch next."""
        if self.group is not None:
            self.group.steps.begin(rows)

    def memory_stats(self) -> ExpertMemoryStats | None:
        return None if self.memory is None else self.memory.stats()

    def close(self) -> None:
        """End the threads beside the steps, release the runner, and leave the group."""
        if self.expert_file is not None:
            self.expert_file.close()
        if self.memory is not None:
            self.memory.close()
        self.release()
        if self.collectives is not None:
            self.collectives.close()
