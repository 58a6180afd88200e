"""The engine in this process, without sockets: prompts of token ids in, token ids out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from experts.prediction.prefetcher import PrefetchObserver
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_drafts, build_scheduler, build_text_parts
from moeserve.engine.rank import Rank
from moeserve.grammars.made_masks import MaskMaker
from moeserve.grammars.masks import GrammarMasks
from moeserve.plan import Asked, FinishReason, Request, SamplingParams, TokenLogprobs
from moeserve.scheduling.led_requests import LedRequests
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part
from moeserve.scheduling.steps import Executor, LocalExecutor, Steps

_MASK_SECONDS = 0.002  # of one wait for a mask where nothing can be computed


@dataclass(slots=True)
class Completion:
    """The answer to one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


def advance(steps: Steps, masks: MaskMaker) -> list[RequestOutput] | None:
    """Do what `Steps.advance` does, but wait a moment where nothing can be computed before a mask is made."""
    outputs = steps.advance()
    if outputs is None and masks.is_awaited:
        masks.wait(_MASK_SECONDS)
        return []
    return outputs


class TokenEngine:
    """A model in this process, with the service's scheduler and prefix cache."""

    def __init__(self, model_dir: str | Path, config: ServeConfig | None = None) -> None:
        """Load the model on a CPU, on one rank; `experts` is the memory of its experts, None where all are there.

        Raise ModelError or ConfigError for what cannot be served.
        """
        config = replace(config or ServeConfig(), record_experts=False)
        directory = Path(model_dir)
        rank = load_rank(directory, plan_model(directory, config), config, lambda _: None).start()
        self.experts = rank.memory
        self._schedule(directory, config, rank, LocalExecutor(rank.runner))

    def _schedule(
        self, directory: Path, config: ServeConfig, rank: Rank, executor: Executor, further: Sequence[Part] = ()
    ) -> None:
        """Make the scheduler and what belongs to it. rank: the first one. further: parts beside those of texts."""
        model = rank.model
        self._rank, self.spec, self._count = rank, model.spec, 0
        self.caches, self.drafts = build_caches(config, model.kv), build_drafts(config, model.kv, rank.depth)
        tokenizer, most = directory / "tokenizer.json", self.drafts.most_forced
        self.masks = GrammarMasks(tokenizer, model.spec.vocab_size, model.eos_token_ids, most_drafts=most)
        self.led = LedRequests()
        parts = [self.led, *build_text_parts(self.masks, self.drafts), *further]
        self.scheduler = build_scheduler(config, model.kv, self.caches, depth=rank.depth, parts=parts)
        self.steps = Steps(self.scheduler, executor, rank.depth)

    @contextmanager
    def without_prefetching(self) -> Iterator[None]:
        """Load no experts ahead, and decide nothing about it, meanwhile."""
        observers = self._rank.runner.observers
        assert isinstance(observers, list), "the model's layers tell the same list"
        removed = [(place, one) for place, one in enumerate(observers) if isinstance(one, PrefetchObserver)]
        for _, one in removed:
            observers.remove(one)
        try:
            yield
        finally:
            for place, one in removed:
                observers.insert(place, one)

    def close(self) -> None:
        """End the threads beside the model. Nothing can be generated after it."""
        self.masks.close()
        self._rank.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        predicted: Sequence[Sequence[int]] | None = None,
    ) -> list[Completion]:
        """Complete prompts of token ids together and return them in order. One `sampling` serves all.

        predicted: the answers as their clients predict them.

        Raise NeverFitsError or QueueFullError as the scheduler does, and RuntimeError if the model fails.
        """
        shared = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        completions: dict[str, Completion] = {}
        for prompt, own, guess in zip(prompts, shared, predicted or [()] * len(prompts), strict=True):
            request_id = f"llm-{self._count}"
            self._count += 1
            completions[request_id] = Completion()
            asked = Asked(predicted=array("i", guess))
            self.scheduler.add(Request(request_id, array("i", prompt), own, asked=asked))
        while (outputs := advance(self.steps, self.masks)) is not None:
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                completion = completions[output.request.request_id]
                if output.token_id is not None:
                    completion.token_ids.append(output.token_id)
                if output.logprobs is not None:
                    completion.logprobs.append(output.logprobs)
                completion.finish_reason = output.finish_reason
                completion.num_cached_tokens = output.request.num_cached_tokens
        self.scheduler.take_started()
        return list(completions.values())
