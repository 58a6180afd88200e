"""What the gates of a step chose, on its way from the device: copied without waiting, read with the step's result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from experts.observer import RoutingTap
from kernels.ops import Ops
from kernels.transfer import to_host
from moeserve.model.decoder import Decoder, ForwardBatch, KvPools


@dataclass(frozen=True, slots=True)
class StepRouting:
    """ids: [R, k], of one layer after the other. In a padded batch each layer has `num_padded` rows, of which the first
    `num_rows` are the step's; otherwise all are, and both are 0."""

    ids: Tensor
    num_padded: int = 0
    num_rows: int = 0

    def __bytes__(self) -> bytes:
        """See `experts.routing.unpack`. Only of ids at home."""
        ids = self.ids
        if self.num_padded:
            ids = ids.view(-1, self.num_padded, ids.shape[1])[:, : self.num_rows]
        data: bytes = ids.numpy().tobytes()
        return data

    def at_home(self) -> StepRouting:
        """A copy that arrives in the order of the stream: read it after an event behind it."""
        return StepRouting(to_host(self.ids), self.num_padded, self.num_rows)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward leaves on the device, of the wanted rows: states [S, H] behind the last norm, and logits
    [S, vocab], None where they are made of some states at a time. routing: None if nobody listens."""

    states: Tensor
    logits: Tensor | None
    routing: StepRouting | None = None

    def of_first(self, num_rows: int) -> Computed:
        """Of a batch of decodes that is padded from a row on."""
        routing = self.routing
        if routing is not None:
            routing = StepRouting(routing.ids, self.states.shape[0], num_rows)
        return Computed(self.states[:num_rows], None if self.logits is None else self.logits[:num_rows], routing)


class HeardDecoder:
    """A decoder over its KV memory, and what hears its gates, if something does."""

    def __init__(self, decoder: Decoder, kv_pools: KvPools, tap: RoutingTap | None = None) -> None:
        self._decoder, self._kv_pools, self._tap = decoder, kv_pools, tap

    def __call__(self, batch: ForwardBatch, *, with_logits: bool = True) -> Computed:
        """See `Decoder.states`. A graph can record it: replayed, it writes the same tensors anew."""
        routing = None
        if self._tap is None:
            states = self._decoder.states(batch, self._kv_pools)
        else:
            self._tap.begin()
            states = self._decoder.states(batch, self._kv_pools)
            ids = self._tap.take().joined()
            routing = None if ids is None else StepRouting(ids)
        return Computed(states, self.logits(states) if with_logits else None, routing)

    @property
    def ops(self) -> Ops:
        """The decoder's."""
        return self._decoder.ops

    def logits(self, states: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return self._decoder.logits(states)

    def serve_others(self) -> Tensor:
        """See `Decoder.serve_others`."""
        return self._decoder.serve_others()
