"""A decoder on transformers' modelling code, with the interface of `moeserve.model.decoder.Decoder`.

Modelling code computes all rows of a step as one text; modules that mix tokens work per request, over the paged memory
(`moeserve.model.hf.attention`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from experts.moe_layer import RoutedExperts
from experts.observer import AnyObserver
from kernels.ops import Ops
from kernels.packed_experts import Experts
from moeserve.model.decoder import ForwardBatch, KvPools
from moeserve.model.hf.caches import step_cache
from moeserve.model.hf.check import BeginStep, MakeBatch, batch_on_cpu, choose_ways, has_far_limits, low_limits
from moeserve.model.hf.exact import ExactFunctions
from moeserve.model.hf.experts import ExpertLayer
from moeserve.model.hf.gates import FoundGate, GateSearch
from moeserve.model.hf.geometry import new_cache
from moeserve.model.hf.mixers import Mixers, Ways
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.spec import TransformersSpec
from moeserve.model.hf.step import PAGED, Step, StepRows
from moeserve.model.state_pool import StatePool

log = structlog.get_logger(__name__)


class TransformersDecoder:
    """A loaded model.

    It holds weights only; the data of requests comes with each call, except for opaque layers (`LayerMemory`).

    step: the present step, as all parts of `code` see it. routed: by layer, the experts that our kernels compute.
    serves_others: True if their dispatch is not that of a single rank.
    """

    gives_logits = True

    def __init__(
        self,
        spec: TransformersSpec,
        code: ModellingCode,
        ops: Ops,
        step: Step,
        routed: Sequence[RoutedExperts],
        *,
        max_model_len: int,
        dtype: torch.dtype,
        serves_others: bool,
        observers: Sequence[AnyObserver],
    ) -> None:
        self.spec, self.dtype, self.max_model_len = spec, dtype, max_model_len
        self.ops, self.device = ops, ops.device
        self._code, self._step = code, step
        self._routed, self._serves_others = routed, serves_others
        self._observers = observers
        for layer in self._layers():
            layer.register_forward_hook(self._observe_layer)
        self._gates: list[tuple[FoundGate, Tensor]] = []
        self._cache = step_cache(spec.geometry, step)
        self._mixers = Mixers(code, spec.geometry, step, ops)
        self._mixers.use(Ways())
        self._head = Head(code)
        exact = ExactFunctions(code.outer.parameters()) if ops.same_bits else nullcontext()
        self._exact: AbstractContextManager[object] = exact
        # A body that can leave out rows must compute all of them.
        takes = inspect.signature(code.body.forward).parameters
        self._all_rows = {"logits_to_keep": None} if "logits_to_keep" in takes else {}

    def settle(self, begin_step: BeginStep, batch_of: MakeBatch = batch_on_cpu) -> None:
        """See `StepDecoder.settle`. batch_of: makes the batches of its steps.

        Raise UnsupportedModel if no way to call the mixers gives the right numbers.
        """
        pairs = ((layer, part) for layer in self._layers() for part in layer.modules() if isinstance(part, ExpertLayer))
        with GateSearch(dict(pairs), 0 if self.spec.moe is None else self.spec.moe.num_experts) as search:
            ways = choose_ways(self, begin_step, batch_of)
        self._gates, (together, apart) = search.gates(), self.num_mixers
        log.info("transformers_code", type=self.spec.model_type, mixers=str(ways), together=together, apart=apart)

    def _layers(self) -> list[GradientCheckpointingLayer]:
        return [layer for layer in self._code.body.modules() if isinstance(layer, GradientCheckpointingLayer)]

    def _observe_layer(self, *_: Any) -> None:
        for observer in self._observers:
            observer.passed()

    @property
    def experts(self) -> list[Experts]:
        """The local experts of each layer that has some."""
        return [routed.experts for routed in self._routed]

    def gated_blocks(self) -> list[tuple[FoundGate, Tensor]]:
        """Return the gates that `settle` has found: of all layers with experts, or none."""
        return self._gates

    def forward(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Return the logits [S, vocab] of the rows that need them. See `states`."""
        return self.logits(self.states(batch, kv_pools))

    def logits(self, states: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab]."""
        with self._exact:
            return self._head(states)

    def states(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Return the states [S, hidden] after the last norm, of the rows that need logits. Like `Decoder.states`.

        kv_pools: the pools of `spec.kv_layers`, then the states of all layers in order, [num_rows, ...] each.
        """
        pools = [keys for keys, _ in kv_pools]
        num_kv = len(self.spec.kv_layers)
        states = self.spec.geometry.name_states(pools[num_kv:])
        attention, windows = batch.attention, batch.window_attention
        assert isinstance(attention, StepRows)
        assert windows is None or isinstance(windows, StepRows)
        self._step.begin(attention, windows, pools[:num_kv], states, batch.states)
        self._code.config._attn_implementation_internal = PAGED
        try:
            with self._exact:
                out = self._code.body(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    past_key_values=self._cache,
                    use_cache=True,
                    **self._all_rows,
                )
        finally:
            self._code.config._attn_implementation_internal = "eager"
            self._step.end()
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)

    def own_states(self, pieces: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield [t, hidden] of each piece of one text, as the model itself computes it with a cache of its own."""
        cache, start = new_cache(self.spec.geometry.cache_class, self._code.config), 0
        for piece in pieces:
            positions = torch.arange(start, start + len(piece), device=self.device)[None]
            out = self._code.body(
                input_ids=torch.tensor([list(piece)], device=self.device),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                **self._all_rows,
            )
            start += len(piece)
            yield out.last_hidden_state[0]

    def can_use(self, ways: Ways) -> bool:
        """Return whether these ways would call some mixer of this model differently than cheaper ways do."""
        if ways.scans:
            return True
        return self.spec.geometry.has_states if ways.singly else self._mixers.has_scans

    def use(self, ways: Ways) -> None:
        self._mixers.use(ways)

    @property
    def has_far_limits(self) -> bool:
        """True if the model changes its behaviour later in a text than the check's texts reach."""
        return has_far_limits(self._code)

    def low_limits(self) -> AbstractContextManager[None]:
        """Let the model change its behaviour after a few tokens, for the check."""
        return low_limits(self._code)

    def arrange_pools(self, kv_layers: KvPools, state_pool: StatePool | None) -> KvPools:
        """Return the pools as `states` takes them."""
        states = [] if state_pool is None else [state for layer in state_pool.layers for state in layer]
        return [*kv_layers, *((state, None) for state in states)]

    @property
    def num_mixers(self) -> tuple[int, int]:
        """The number of mixers called together, and the number called apart."""
        return self._mixers.num_together, self._mixers.num_apart

    def serve_others(self) -> Tensor:
        """Compute rows of other ranks with local experts, in a step without rows of this rank. Return [0, hidden]."""
        moe = self.spec.moe
        if self._serves_others and moe is not None:
            no_rows = torch.empty((0, self.spec.expert_hidden_size), dtype=self.dtype, device=self.device)
            for routed in self._routed:
                routed.serve_others(no_rows, moe.gate.top_k)
        return torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)


class Head:
    """Computes logits from the last states as the outer model does: projection, scale, cap.

    The outer model runs with a body that returns the given states.
    """

    def __init__(self, code: ModellingCode) -> None:
        self._writer = code.writer
        self._inner = code.writer.base_model if code.writer.base_model is not code.writer else code.body

    def __call__(self, states: Tensor) -> Tensor:
        answer = _States(last_hidden_state=states[None])
        self._inner.forward = lambda *_, **__: answer
        try:
            no_ids = torch.zeros((1, len(states)), dtype=torch.int64, device=states.device)
            out: Any = self._writer(input_ids=no_ids, use_cache=False)
        finally:
            del self._inner.forward
        logits: Tensor = out.logits[0]
        return logits


class _States(BaseModelOutputWithPast):
    """The output of a body with only its last states; any other attribute that the outer model reads is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
