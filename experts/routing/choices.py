"""The gates' choices: the routing of a step as arrays, statistics of the latest steps, and affinity. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Ids = NDArray[np.integer]

# In place of an expert id where a layer left a row out.
NOT_COMPUTED = -1

_RESCALE_AT = 2.0**20  # all counts are scaled down once the weight of a new row exceeds this
_STEPS_PER_DIGEST = 64  # steps are counted together, at most this number
_ROWS_PER_DIGEST = 256  # or as soon as they have this number of rows


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """num_layers: layers with experts. last_is_sparse: the model's last layer is one of them."""

    num_layers: int
    num_experts: int
    top_k: int
    last_is_sparse: bool = True


def unpack(data: bytes, shape: RoutingShape, num_rows: int, logit_rows: Sequence[int]) -> NDArray[np.int16]:
    """[L, T, k]: the expert ids in the bytes of `RoutingTap.take`.

    The model's last layer computes only `logit_rows`; its other rows are NOT_COMPUTED. ValueError for bytes that do
    not fit.
    """
    flat = np.frombuffer(data, np.uint8 if shape.num_experts <= 256 else np.int16)
    num_whole = shape.num_layers - shape.last_is_sparse
    in_whole = num_whole * num_rows * shape.top_k
    in_last = len(logit_rows) * shape.top_k if shape.last_is_sparse else 0
    if len(flat) != in_whole + in_last:
        raise ValueError(f"{len(flat)} expert ids where {in_whole + in_last} belong")
    ids = np.full((shape.num_layers, num_rows, shape.top_k), NOT_COMPUTED, np.int16)
    ids[:num_whole] = flat[:in_whole].reshape(num_whole, num_rows, shape.top_k)
    if shape.last_is_sparse:
        ids[num_whole, np.asarray(logit_rows, np.int64)] = flat[in_whole:].reshape(len(logit_rows), shape.top_k)
    return ids


class RoutingRecorder:
    """Gathers routing into statistics a few steps at a time, so that a step pays next to nothing.

    Owns the statistics. Several steps are counted as one, since no table relates one token to another.
    """

    def __init__(self, statistics: RoutingStatistics) -> None:
        self._statistics = statistics
        self._ids: list[NDArray[np.int16]] = []
        self._token_ids: list[Sequence[int]] = []
        self._num_rows = 0
        self.num_tokens = 0

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int]) -> None:
        """Add the routing of one rank's step: ids [L, T, k], NOT_COMPUTED where a layer left a row out."""
        self._ids.append(ids)
        self._token_ids.append(token_ids)
        self._num_rows += len(token_ids)
        self.num_tokens += len(token_ids)
        if len(self._ids) >= _STEPS_PER_DIGEST or self._num_rows >= _ROWS_PER_DIGEST:
            self._digest()

    def statistics(self) -> RoutingStatistics:
        self._digest()
        return self._statistics

    def _digest(self) -> None:
        if self._ids:
            token_ids = np.concatenate([np.asarray(part, np.int64) for part in self._token_ids])
            self._statistics.update(np.concatenate(self._ids, axis=1), token_ids)
            self._ids, self._token_ids, self._num_rows = [], [], 0


@dataclass(frozen=True, slots=True)
class StatisticsSpec:
    """Sizes of the model and bounds of the memory.

    half_life: tokens after which an observation counts half. max_distance: the most layers that a transition spans.
    max_rows_per_step: rows of a step that enter the transitions and the recent choices; a longer step enters as an even
    sample, weighted up, but load counts every row. num_tokens: token ids whose first-layer experts are remembered, 0
    for none. num_recent: tokens whose whole routing is kept.
    """

    num_layers: int
    num_experts: int
    top_k: int
    half_life: int = 100_000
    max_distance: int = 3
    max_rows_per_step: int = 64
    num_tokens: int = 4096
    num_recent: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")
        for name in ("num_layers", "half_life", "max_rows_per_step", "num_recent"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.max_distance < 0:
            raise ValueError(f"max_distance is {self.max_distance}, but must not be negative")

    def distances(self) -> range:
        """Return 1 … max_distance, or fewer if there are fewer layers."""
        return range(1, min(self.max_distance, self.num_layers - 1) + 1)


class RoutingStatistics:
    """Load, transitions between layers, recent choices, and first experts by token, gathered step by step.

    Tables count in units of one token seen now. All are bounded and decay exponentially by tokens seen: instead of
    shrinking every table in every step, new observations weigh more and more, and all tables are rescaled once the
    weight is large. Only `update` mutates.
    """

    def __init__(self, spec: StatisticsSpec) -> None:
        layers, experts = spec.num_layers, spec.num_experts
        self.spec = spec
        self._weight = 1.0
        self._load: Float = np.zeros((layers, experts), np.float32)
        self._transitions: dict[int, Float] = {
            distance: np.zeros((layers - distance, experts, experts), np.float32) for distance in spec.distances()
        }
        self._token_row: dict[int, int] = {}
        self._token_ids = np.full(spec.num_tokens, -1, np.int64)
        self._token_counts: Float = np.zeros((spec.num_tokens, experts), np.float32)
        self._token_seen: Float = np.zeros(spec.num_tokens, np.float32)
        self._recent = np.zeros((layers, spec.num_recent, spec.top_k), np.uint16)
        self._recent_at = 0
        self._num_recent = 0

    def update(self, routing: Ids, token_ids: Ids | None = None) -> None:
        """Count one step.

        routing: expert ids [L, T, k], distinct within a token; -1 where a layer did not compute the token, which
        is then not counted there. token_ids: [T], the tokens that were routed; without them the table of first-layer
        experts stays as it is. ValueError for another shape or an unknown expert.
        """
        spec = self.spec
        if routing.ndim != 3 or routing.shape[0] != spec.num_layers or routing.shape[2] != spec.top_k:
            raise ValueError(f"routing is {list(routing.shape)}, expected [{spec.num_layers}, T, {spec.top_k}]")
        num_rows = routing.shape[1]
        if num_rows == 0:
            return
        ids = routing.astype(np.int64)
        if ids.min() < -1 or ids.max() >= spec.num_experts:
            raise ValueError(f"routing names an expert outside 0 … {spec.num_experts - 1}")
        if token_ids is not None and token_ids.shape != (num_rows,):
            raise ValueError(f"token_ids is {list(token_ids.shape)}, expected [{num_rows}]")
        self._grow_weight(num_rows)
        _count(self._load, self._cells(ids), self._weight, ids >= 0)
        sample = ids
        if num_rows > spec.max_rows_per_step:
            chosen = np.linspace(0, num_rows - 1, spec.max_rows_per_step).astype(np.int64)
            sample = ids[:, chosen]
        self._count_pairs(sample, self._weight * num_rows / sample.shape[1])
        self._keep_recent(sample)
        if token_ids is not None and spec.num_tokens:
            self._count_tokens(ids[0], token_ids)

    def load(self) -> Float:
        """[L, E]: tokens that chose the expert."""
        return self._load / np.float32(self._weight)

    def transitions(self, distance: int) -> Float:
        """[L - distance, E, E]: tokens that chose expert i at layer l and j at l + distance."""
        return self._transitions[distance] / np.float32(self._weight)

    def recent(self) -> NDArray[np.uint16]:
        """[L, N, k]: the routing of up to `num_recent` sampled tokens that all layers computed, in no order."""
        return self._recent[:, : self._num_recent]

    def first_experts(self, token_id: int) -> Float | None:
        """[E] how often the token chose each expert of the first layer, or None if it is not remembered."""
        row = self._token_row.get(token_id)
        return None if row is None else self._token_counts[row] / np.float32(self._weight)

    def tables(self) -> dict[str, NDArray[np.generic]]:
        """Return all gathered counts, by name, in one unit; `restore` is the inverse."""
        rows = np.fromiter(self._token_row.values(), np.int64, len(self._token_row))
        return {
            "load": self.load(),
            "recent": np.ascontiguousarray(self.recent()),
            "token_ids": self._token_ids[rows],
            "token_counts": self._token_counts[rows] / np.float32(self._weight),
            **{f"transitions.{distance}": self.transitions(distance) for distance in self._transitions},
        }

    @classmethod
    def restore(cls, spec: StatisticsSpec, tables: dict[str, NDArray[np.generic]]) -> RoutingStatistics:
        """Make statistics from the `tables()` of others with the same spec. ValueError if they do not fit the spec."""
        self = cls(spec)
        expected = self.tables()
        if set(tables) != set(expected):
            raise ValueError(f"expected tables {sorted(expected)}, found {sorted(tables)}")
        bounds = {
            "recent": (1, spec.num_recent),
            "token_ids": (0, spec.num_tokens),
            "token_counts": (0, spec.num_tokens),
        }
        for name, empty in expected.items():
            found = tables[name]
            shape = list(empty.shape)
            if name in bounds and found.ndim == empty.ndim:
                axis, most = bounds[name]
                shape[axis] = min(found.shape[axis], most)
            if list(found.shape) != shape or found.dtype != empty.dtype:
                raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, expected {empty.dtype} {shape}")
            if found.dtype.kind == "f" and not (np.isfinite(found).all() and (found.astype(np.float32) >= 0).all()):
                raise ValueError(f"{name} holds a count that is negative or not finite")
        self._load[:] = tables["load"]
        for distance, table in self._transitions.items():
            table[:] = tables[f"transitions.{distance}"]
        self._restore_tokens(tables["token_ids"], tables["token_counts"])
        recent = tables["recent"]
        if recent.size and int(recent.max()) >= spec.num_experts:
            raise ValueError(f"recent names an expert outside 0 … {spec.num_experts - 1}")
        self._num_recent = recent.shape[1]
        self._recent_at = self._num_recent % spec.num_recent
        self._recent[:, : self._num_recent] = recent
        return self

    def _grow_weight(self, num_rows: int) -> None:
        self._weight *= 2.0 ** (num_rows / self.spec.half_life)
        if self._weight > _RESCALE_AT:
            shrink = np.float32(1 / self._weight)
            for table in (self._load, self._token_counts, self._token_seen):
                table *= shrink
            for table in self._transitions.values():
                table *= shrink
            self._weight = 1.0

    def _cells(self, routing: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of (layer, expert) in a flat [L, E]."""
        layers = np.arange(len(routing), dtype=np.int64)[:, None, None]
        return layers * self.spec.num_experts + routing

    def _count_pairs(self, routing: NDArray[np.int64], weight: float) -> None:
        rows = self._cells(routing) * self.spec.num_experts
        known = routing >= 0
        for distance, table in self._transitions.items():
            pairs = rows[:-distance, ..., None] + routing[distance:, :, None, :]
            _count(table, pairs, weight, known[:-distance, ..., None] & known[distance:, :, None, :])

    def _keep_recent(self, routing: NDArray[np.int64]) -> None:
        size = self.spec.num_recent
        routing = routing[:, (routing >= 0).all(axis=(0, 2))][:, -size:]
        if not routing.shape[1]:
            return
        positions = (self._recent_at + np.arange(routing.shape[1])) % size
        self._recent[:, positions] = routing
        self._recent_at = int(positions[-1] + 1) % size
        self._num_recent = min(self._num_recent + routing.shape[1], size)

    def _count_tokens(self, first: NDArray[np.int64], token_ids: Ids) -> None:
        # The first tokens of a long prompt suffice: a step must not need more rows than the table has.
        known, inverse = np.unique(token_ids[: self.spec.num_tokens], return_inverse=True)
        wanted: list[int] = known.tolist()
        self._make_room([token for token in wanted if token not in self._token_row], keep=set(wanted))
        rows = np.fromiter((self._token_row[token] for token in wanted), np.int64, len(wanted))
        _count(self._token_seen, rows[inverse], self._weight, first[: len(inverse), 0] >= 0)
        first = first[: len(inverse)]
        cells = rows[inverse][:, None] * self.spec.num_experts + first
        _count(self._token_counts, cells, self._weight, first >= 0)

    def _make_room(self, new: list[int], keep: set[int]) -> None:
        """Give every new token a row; the least counted tokens lose theirs."""
        used = len(self._token_row)
        free = list(range(used, min(used + len(new), self.spec.num_tokens)))
        lacking = len(new) - len(free)
        if lacking > 0:
            rows = np.argsort(self._token_seen[:used], kind="stable").tolist()
            leaving = [row for row in rows if int(self._token_ids[row]) not in keep][:lacking]
            for row in leaving:
                del self._token_row[int(self._token_ids[row])]
            free += leaving
        for token, row in zip(new, free, strict=True):
            self._token_row[token] = row
            self._token_ids[row] = token
            self._token_counts[row] = 0
            self._token_seen[row] = 0

    def _restore_tokens(self, token_ids: NDArray[np.generic], counts: NDArray[np.generic]) -> None:
        found: list[int] = token_ids.tolist()
        if len(counts) != len(found) or len(set(found)) != len(found):
            raise ValueError("token_ids and token_counts do not belong together")
        self._token_row = {token: row for row, token in enumerate(found)}
        self._token_ids[: len(found)] = token_ids
        self._token_counts[: len(found)] = counts
        self._token_seen[: len(found)] = self._token_counts[: len(found)].sum(axis=1) / self.spec.top_k


def _count(table: Float, cells: NDArray[np.int64], weight: float, known: NDArray[np.bool_]) -> None:
    np.add.at(table.reshape(-1), cells[known], np.float32(weight))


class Affinity:
    """P(expert j at layer l + d | expert i at layer l) for d = 1 … max_distance. Immutable.

    A token chooses k experts per layer, so this is a probability for each j by itself and sums to k over j. The
    estimate is the mean of a Dirichlet posterior whose prior is the popularity of j, so a rare pair is estimated by
    popularity.
    """

    def __init__(self, load: Float, transitions: Mapping[int, Float], top_k: int) -> None:
        """load: [L, E]; transitions[d]: [L - d, E, E], both in tokens, as `RoutingStatistics` has them.

        A token counts for a pair of layers only if both computed it: with k choices in the second one, a row of
        transitions sums to k times the tokens behind it. The prior is worth E / 4 tokens.
        """
        num_experts = load.shape[1]
        prior = np.float32(num_experts / 4)
        tokens = load.sum(axis=1, keepdims=True) / top_k
        uniform = np.float32(top_k / num_experts)
        self._popularity: Float = (load + prior * uniform) / (tokens + prior)
        self._prior = prior
        self._tokens: dict[int, Float] = {
            distance: counts.sum(axis=2) / np.float32(top_k) for distance, counts in transitions.items()
        }
        self._conditional = {
            distance: (counts + prior * self._popularity[distance:, None, :])
            / (self._tokens[distance][..., None] + prior)
            for distance, counts in transitions.items()
        }

    @classmethod
    def of(cls, statistics: RoutingStatistics) -> Affinity:
        transitions = {distance: statistics.transitions(distance) for distance in statistics.spec.distances()}
        return cls(statistics.load(), transitions, statistics.spec.top_k)

    def popularity(self) -> Float:
        """[L, E]: P(a token chooses the expert)."""
        return self._popularity

    def distances(self) -> Set[int]:
        return self._conditional.keys()

    def conditional(self, distance: int) -> Float:
        """[L - distance, E, E]: P(j at l + distance | i at l)."""
        return self._conditional[distance]

    def log_lifts(self, layer: int, distance: int) -> Float:
        """[E, E]: log of how much likelier i at `layer` makes j at layer + distance, as far as the counts support it.

        Even if j, of popularity p, does not depend on i, the logarithm of n tokens that chose i has the variance
        (1 - p) / (n p). All logarithms of the two layers are multiplied by the share of their mean square that this
        chance does not explain. The share is 0 between independent layers and nears 1 with many counts (shrinkage after
        James and Stein 1961, with the mean over pairs i, j weighted by their expected counts).
        """
        popularity = self._popularity[layer + distance]
        tokens = self._tokens[distance][layer][:, None]
        lifts: Float = np.log(self._conditional[distance][layer]) - np.log(popularity)
        found = float((tokens * popularity * lifts**2).sum())
        by_chance = float((np.square(tokens / (tokens + self._prior)) * (1 - popularity)).sum())
        return lifts * np.float32(1 - by_chance / found if found > by_chance else 0.0)
