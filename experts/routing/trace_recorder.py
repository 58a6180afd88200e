"""Records a routing trace while a model serves, up to a bound. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.routing.step_routing import RoutingShape
from experts.routing.traces import RoutingTrace

UNKNOWN_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Neighbouring rows of a step that belong to one request.

    start: the first row's position in the request. prefix: where the request's first tokens are kept; requests that
    begin alike share them.
    """

    request: str
    num_rows: int
    start: int
    prefix: Hashable


class TraceRecorder:
    """Keeps the first `max_tokens` tokens. What tokens they are is left out unless `with_token_ids`.

    The model's last layer computes only rows whose logits are wanted, so a trace goes up to the layer before it.
    """

    def __init__(self, shape: RoutingShape, max_tokens: int, *, with_token_ids: bool) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._shape = shape
        self._with_token_ids = with_token_ids
        self._ids: list[NDArray[np.uint16]] = []
        self._token_ids: list[NDArray[np.int32]] = []
        self._requests: list[NDArray[np.int32]] = []
        self._families: list[NDArray[np.int32]] = []
        self._number_of: dict[str, int] = {}
        self._family_of_request: dict[str, int] = {}
        self._family_of_prefix: dict[Hashable, int] = {}

    @property
    def is_full(self) -> bool:
        return self.num_tokens == self.max_tokens

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int], rows: Sequence[RequestRows]) -> None:
        """Takes one rank's step: ids [L, T, k], token_ids [T], and whose rows they are, in order."""
        room = self.max_tokens - self.num_tokens
        if not room:
            return
        counts = [part.num_rows for part in rows]
        num_layers = self._shape.num_layers - self._shape.last_is_sparse
        self._ids.append(ids[:num_layers, :room].astype(np.uint16))
        known = np.asarray(token_ids, np.int32) if self._with_token_ids else np.full(len(token_ids), UNKNOWN_TOKEN)
        self._token_ids.append(known[:room].astype(np.int32))
        numbers = [self._number_of.setdefault(part.request, len(self._number_of)) for part in rows]
        self._requests.append(np.repeat(np.asarray(numbers, np.int32), counts)[:room])
        families = [self._family(part) for part in rows]
        self._families.append(np.repeat(np.asarray(families, np.int32), counts)[:room])
        self.num_tokens += len(self._requests[-1])

    def trace(self) -> RoutingTrace | None:
        """What was recorded, in the order in which it was computed; None if that is nothing."""
        if not self.num_tokens or not self._ids[0].shape[0]:
            return None
        return RoutingTrace(
            self._shape.num_experts,
            np.concatenate(self._ids, axis=1),
            np.concatenate(self._requests),
            np.concatenate(self._token_ids),
            np.concatenate(self._families),
        )

    def _family(self, rows: RequestRows) -> int:
        """A request that computes its first token founds a family; one that finds it computed joins the founder's."""
        family = self._family_of_request.get(rows.request)
        if family is None:
            fresh = len(self._family_of_request)
            family = fresh if rows.start == 0 else self._family_of_prefix.get(rows.prefix, fresh)
            self._family_of_request[rows.request] = family
            self._family_of_prefix[rows.prefix] = family
        return family
