"""Signatures of cached prefixes: made on the rank that computed the tokens, kept by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.routing.signatures import encode_signature, merge_signatures
from experts.routing.step_routing import RoutingShape, unpack
from moeserve.config import ServeConfig
from moeserve.executor import FinishedStep, LaunchedStep, LaunchingRunner, Runner
from moeserve.models.spec import DecoderSpec
from moeserve.plan import Chunk, StepPlan, StepResult, wanted_logits
from moeserve.request_memory import MergeAnnotations

# Tokens that came one at a time are described together.
_TOKENS_AT_ONCE = 64
# A request that no plan has named for so many steps is over, or will be matched with the cache anew.
_FORGOTTEN_AFTER = 64


def signature_merger(spec: DecoderSpec) -> MergeAnnotations:
    """One signature out of those along a prefix, of a model with experts."""
    assert spec.moe is not None
    num_layers, num_experts = len(spec.moe_layers), spec.moe.num_experts

    def merge(parts: Sequence[tuple[int, bytes]]) -> bytes:
        return encode_signature(merge_signatures(parts, num_layers, num_experts))

    return merge


def signs_prefixes(config: ServeConfig) -> bool:
    """Whether cached prefixes are kept with signatures, where not all experts are in the fast tier."""
    return config.expert_prefetch != "off" and config.enable_prefix_caching


class AnnotatingRunner:
    """A runner whose results carry the signatures of the tokens that they complete blocks of.

    A chunk of a prompt is described when it ends a block, and what came one by one when that ends a block and is
    enough. A few tokens after the last whole block count with those before it.
    """

    def __init__(self, runner: Runner, shape: RoutingShape, block_size: int, *, keeps_routing: bool) -> None:
        """runner: its results have routing, which somebody else wants to see if `keeps_routing`."""
        self._runner = runner
        self._shape = shape
        self._block_size = block_size
        self._keeps_routing = keeps_routing
        self._seen: dict[str, _Seen] = {}
        self._num_steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        return self._annotated(plan, self._runner.run(plan))

    def _annotated(self, plan: StepPlan, result: StepResult) -> StepResult:
        if plan.chunks and result.routing is not None:
            self._annotate(plan, result, bytes(result.routing))
        if not self._keeps_routing:
            result.routing = None
        return result

    def _annotate(self, plan: StepPlan, result: StepResult, routing: bytes) -> None:
        self._num_steps += 1
        ids = unpack(routing, self._shape, plan.num_tokens, wanted_logits(plan.chunks)[0])
        row = 0
        for chunk, computed in zip(plan.chunks, result.chunks, strict=True):
            rows = ids[:, row : row + len(chunk.token_ids)]
            row += len(chunk.token_ids)
            computed.annotation = self._describe(chunk, rows)
        if self._num_steps % _FORGOTTEN_AFTER == 0:
            latest = self._num_steps - _FORGOTTEN_AFTER
            self._seen = {name: seen for name, seen in self._seen.items() if seen.last_step > latest}

    def _describe(self, chunk: Chunk, ids: NDArray[np.int16]) -> bytes | None:
        """ids: [L, T, k] of the chunk's rows."""
        num_tokens = len(chunk.token_ids)
        end = chunk.start + num_tokens
        seen = self._seen.get(chunk.request_id)
        if seen is None or seen.end != chunk.start:
            seen = self._seen[chunk.request_id] = _Seen(self._shape)
        seen.add(ids, end, self._num_steps)
        ends_block = end // self._block_size > chunk.start // self._block_size
        if not ends_block or (num_tokens == 1 and seen.num_tokens < _TOKENS_AT_ONCE):
            return None
        del self._seen[chunk.request_id]
        return encode_signature(seen.rates())


class AnnotatingLauncher(AnnotatingRunner):
    """The same on a device with a queue. Results are read in the order of their steps."""

    def __init__(self, runner: LaunchingRunner, shape: RoutingShape, block_size: int, *, keeps_routing: bool) -> None:
        super().__init__(runner, shape, block_size, keeps_routing=keeps_routing)
        self._launching = runner

    def launch(self, plan: StepPlan) -> LaunchedStep:
        return FinishedStep(self._launching.launch(plan), lambda result: self._annotated(plan, result))


class _Seen:
    """What a request's tokens since its last signature chose. end: the position after them."""

    __slots__ = ("_counts", "_top_k", "end", "last_step", "num_tokens")

    def __init__(self, shape: RoutingShape) -> None:
        self._top_k = shape.top_k
        # The first column counts what was not computed.
        self._counts = np.zeros((shape.num_layers, shape.num_experts + 1), np.int64)
        self.end = self.last_step = self.num_tokens = 0

    def add(self, ids: NDArray[np.int16], end: int, step: int) -> None:
        """ids: [L, T, k]."""
        num_layers, width = self._counts.shape
        places = ids.reshape(num_layers, -1).astype(np.int64) + (1 + width * np.arange(num_layers))[:, None]
        self._counts += np.bincount(places.ravel(), minlength=self._counts.size).reshape(num_layers, width)
        self.end, self.last_step = end, step
        self.num_tokens += ids.shape[1]

    def rates(self) -> NDArray[np.float32]:
        """[L, E]: the share of the tokens that chose each expert, of those that the layer computed."""
        computed = self.num_tokens - self._counts[:, :1] / self._top_k
        rates: NDArray[np.float32] = (self._counts[:, 1:] / np.maximum(computed, 1)).astype(np.float32)
        return rates
