"""One rank: what computes its steps, who observes them, and its place in a group of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experts.observer import StepObserver
from moeserve.device import KvBudget
from moeserve.plan import Pending, StepPlan, StepResult
from moeserve.steps import Runner

if TYPE_CHECKING:
    import torch

    from experts.collectives import Collectives
    from experts.dispatch import ExpertParallel
    from experts.expert_memory import ExpertMemory
    from experts.prefetcher import PrefetchObserver
    from experts.rebalance import ExpertMigrator
    from experts.residency import ExpertMemoryStats
    from moeserve.model.families import GenerationDefaults
    from moeserve.model.spec import DecoderSpec
    from moeserve.ranks.together import GroupSteps, StepRows

Observers = Sequence[StepObserver[StepPlan, StepResult]]


class ObservedRunner:
    """A runner whose steps are observed."""

    def __init__(self, runner: Runner, observers: Observers = ()) -> None:
        """observers: told of every step in this order."""
        self._runner = runner
        self._observers = observers

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        for observer in self._observers:
            observer.begin(plan)
        step = self._runner.launch(plan)
        for observer in self._observers:
            observer.launched()
        return _Observed(plan, step, self._observers)


@dataclass(frozen=True, slots=True)
class _Observed:
    plan: StepPlan
    step: Pending[StepResult]
    observers: Observers

    @property
    def done(self) -> bool:
        return self.step.done

    def result(self) -> StepResult:
        result = self.step.result()
        for observer in self.observers:
            observer.end(self.plan, result)
        return result


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the engine has to know of a model. `weights_bytes` are those of all ranks, `kv_bytes` those of this one."""

    spec: DecoderSpec
    defaults: GenerationDefaults
    kv: KvBudget
    dtype: torch.dtype
    weights_bytes: int
    kv_bytes: int
    device: str

    @property
    def eos_token_ids(self) -> list[int]:
        return eos_token_ids(self.defaults, self.spec)


def eos_token_ids(defaults: GenerationDefaults, spec: DecoderSpec) -> list[int]:
    """Those of the generation config, else the model's. Some checkpoints name one that no logit stands for."""
    named = defaults.eos_token_ids or spec.eos_token_ids
    return [token for token in named if 0 <= token < spec.vocab_size]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A runner that is ready for any step, with its KV memory.

    weights_bytes: those of all ranks. release: gives up what the runner holds of the group, before that is left.
    """

    runner: Runner
    kv: KvBudget
    kv_bytes: int
    weights_bytes: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Group:
    """A rank's means to compute together with others: what carries rows, where experts are, how steps begin."""

    collectives: Collectives
    experts: ExpertParallel[Any]
    steps: GroupSteps


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank ready for its first step.

    depth: see `moeserve.steps.Steps`. memory: of its experts, None where all are there for good. prefetcher: loads some
    of them ahead, if somebody does. group, migrator, dispatch_shape: None of a rank that is alone.
    """

    runner: ObservedRunner
    model: ServedModel
    depth: int
    release: Callable[[], None]
    memory: ExpertMemory | None = None
    prefetcher: PrefetchObserver | None = None
    group: Group | None = None
    migrator: ExpertMigrator[Any] | None = None
    dispatch_shape: str | None = None

    def begin_step(self, rows: StepRows) -> None:
        """Tells of the step that all ranks are asked for next."""
        assert self.group is not None
        self.group.steps.begin(rows)

    def memory_stats(self) -> ExpertMemoryStats | None:
        return None if self.memory is None else self.memory.stats()

    def close(self) -> None:
        """Ends what runs beside the steps, and leaves the group."""
        if self.memory is not None:
            self.memory.close()
        self.release()
        if self.group is not None:
            self.group.collectives.close()
