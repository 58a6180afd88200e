"""The fast tier at work: slots in memory, threads that fill them, and the decisions of `ResidencyControl`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from experts.errors import ExpertStoreError
from experts.memory.host_share import HostShare
from experts.memory.residency import Access, ExpertMemoryStats, ResidencyControl, SlotState, Transfer
from experts.memory.slots import Slots
from experts.memory.tiers import ExpertTier
from experts.routing.predictors import RecallSample

_SMOOTHING = 0.01  # weight of a new observation in the means of `Pace`
# Of many experts that load, one in four is computed at a time: each turn costs the copiers time as well.
_TURNS = 4


class ExpertMemory:
    """The slots of a fast tier. One thread computes and calls the methods; others, owned by this object, copy.

    An event goes `access`, then `wait_ready` and `release` until all its experts are computed. `event` ends it if the
    computation fails.
    """

    def __init__(self, control: ResidencyControl, arena: Slots, tier: ExpertTier, num_copiers: int = 1) -> None:
        """num_copiers: the threads that copy at once, as `arena` and `tier` allow. Only the first one prefetches."""
        self.stall_seconds = 0.0
        self.predictor_seconds = 0.0
        # The seconds that the host computed experts in place of a device.
        self.host_seconds = 0.0
        # The seconds that copies took, on all copying threads or on the device.
        self.copy_seconds = 0.0
        self.recall = RecallSample()
        # The number of copied pieces of experts: it grows in a slow load, but not in one that hangs.
        self.num_pieces = 0
        self._control = control
        self._share: HostShare | None = None
        self._arena = arena
        self._tier = tier
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for which the computation waits
        self._work = threading.Condition(lock)  # for which copiers wait
        self._closing = False
        self._error: Exception | None = None
        self._pace = Pace(arena.slot_bytes)
        self._copiers = [
            threading.Thread(target=self._copy_until_closed, args=(number > 0,), name="expert-copier", daemon=True)
            for number in range(num_copiers)
        ]
        for copier in self._copiers:
            copier.start()

    def share_with_host(self, share: HostShare) -> None:
        """Let the host compute some experts from now on. share: of the control of this memory."""
        with self._changed:
            self._share = share

    def access(self, layer: int, experts: Iterable[int], num_rows: Mapping[int, int] | None = None) -> Access:
        """Begin an event; missing experts start to load. Raise ExpertStoreError if a load has failed before.

        num_rows: of each of the experts, for a caller whose host can compute them: see `HostShare.access`.
        """
        with self._changed:
            self._check()
            if self._share is None or num_rows is None:
                access = self._control.access(layer, experts)
            else:
                access = self._share.access(layer, num_rows, self._pace.load_seconds)
            self._pace.access(time.perf_counter() - self.stall_seconds)
            if access.missing or access.elsewhere:
                self._wake_copiers()
        self._before_use(layer, access.ready)
        return access

    @contextmanager
    def event(
        self, layer: int, experts: Collection[int], num_rows: Mapping[int, int] | None = None
    ) -> Iterator[Access | None]:
        """Begin an event, None without experts, and end it if the computation inside fails: the next may begin then."""
        access = self.access(layer, experts, num_rows) if experts else None
        try:
            yield access
        except BaseException:
            with self._changed:
                self._control.end_event(layer)
            raise

    def wait_ready(self, layer: int, experts: Collection[int]) -> list[int]:
        """Return the event's `experts` that are ready, waiting until these are some of them.

        Raise ExpertStoreError if a load failed.
        """
        with self._changed:
            ready = self._ready(layer, experts)
            if not self._are_enough(layer, ready, experts):
                started = time.perf_counter()
                while not self._are_enough(layer, ready, experts):
                    self._changed.wait()
                    ready = self._ready(layer, experts)
                self.stall_seconds += time.perf_counter() - started
        self._before_use(layer, ready)
        return ready

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """Release computed experts of the event, so that their slots can be filled with others."""
        self._arena.after_use(layer)
        with self._changed:
            self._control.release(layer, experts)
            self._wake_copiers()

    def turns(self, layer: int, experts: Collection[int]) -> Iterator[list[int]]:
        """Yield the event's `experts` in turns as they become ready; the next turn releases the experts of the last."""
        left = set(experts)
        while left:
            ready = self.wait_ready(layer, left)
            if self.num_waiting(layer):
                # Some slots get the next experts while the others are computed.
                ready = ready[: max(1, self.num_slots(layer) // 2)]
            yield ready
            self.release(layer, ready)
            left.difference_update(ready)

    def decide(self, decision: Callable[[float], None]) -> None:
        """Call `decision`, which enters predictions into the `ResidencyControl`, under its lock.

        The argument of `decision` is `loads_per_layer`.
        """
        with self._changed:
            decision(self._pace.loads_per_layer)
            self._wake_copiers()

    def computed_on_host(self, num_rows: Iterable[int], seconds: float) -> None:
        """Record how long the host took for experts with these numbers of rows."""
        assert self._share is not None
        with self._changed:
            self.host_seconds += seconds
            self._share.costs.learn(num_rows, seconds)

    def loads_per_layer(self) -> float:
        """Return the number of experts that the link loads while one layer is computed, as measured."""
        return self._pace.loads_per_layer

    def contents(self, layer: int) -> list[int]:
        """Return the expert that is ready in each slot, -1 for none."""
        with self._changed:
            return self._control.layers[layer].contents()

    def num_waiting(self, layer: int) -> int:
        """Return the number of experts of the current event that wait for a slot."""
        return self._control.layers[layer].num_waiting

    @property
    def slot_bytes(self) -> int:
        """The size of one slot: an expert in whole pages."""
        return self._arena.slot_bytes

    def num_slots(self, layer: int) -> int:
        return self._control.layers[layer].num_slots

    def stats(self) -> ExpertMemoryStats:
        with self._changed:
            counters = replace(self._control.counters)
            return ExpertMemoryStats(
                counters=counters,
                stall_seconds=self.stall_seconds,
                predictor_seconds=self.predictor_seconds,
                num_in_flight=self._control.num_in_flight,
                resident=[layer.resident() for layer in self._control.layers],
                recall=self.recall.counts(),
                host_seconds=self.host_seconds,
                costs=None if self._share is None else self._share.costs.describe(self._pace.load_seconds),
            )

    def forget_counts(self) -> None:
        """Start counting at zero; residency stays as it is."""
        with self._changed:
            self._control.forget_counts()
            self.stall_seconds = self.predictor_seconds = self.host_seconds = 0.0
        self.recall.forget()

    def close(self) -> None:
        """End the copying threads and close the tier."""
        with self._changed:
            self._closing = True
            self._work.notify_all()
        for copier in self._copiers:
            copier.join()
        self._tier.close()

    def _wake_copiers(self) -> None:
        """Wake the copiers if they have work; without it they would only keep the interpreter from the computation."""
        if self._control.has_waiting:
            self._work.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise ExpertStoreError(str(self._error)) from self._error

    def _ready(self, layer: int, experts: Iterable[int]) -> list[int]:
        self._check()
        residency = self._control.layers[layer]
        return [expert for expert in experts if residency.state_of(expert) is SlotState.READY]

    def _are_enough(self, layer: int, ready: Sequence[int], experts: Collection[int]) -> bool:
        """Return whether to compute the `ready` ones of an event's `experts` now, rather than to wait for more."""
        if len(ready) * _TURNS >= len(experts):
            return True
        residency = self._control.layers[layer]
        return bool(ready) and all(residency.state_of(expert) is not SlotState.LOADING for expert in experts)

    def _before_use(self, layer: int, experts: Iterable[int]) -> None:
        slots = (self._control.layers[layer].slot_of(expert) for expert in experts)
        self._arena.before_use(layer, [slot for slot in slots if slot is not None])

    def _copy_until_closed(self, demanded: bool) -> None:
        """demanded: copy demand loads only."""
        try:
            while (transfer := self._next(demanded)) is not None:
                self._copy(transfer)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self, demanded: bool) -> Transfer | None:
        """Wait for the next transfer to copy; return None when the memory closes."""
        with self._work:
            while not self._closing:
                if (transfer := self._control.next_transfer(demanded=demanded)) is not None:
                    return transfer
                self._work.wait()
        return None

    def _copy(self, transfer: Transfer) -> None:
        assert transfer.slot is not None
        arena = self._arena
        while True:
            start = transfer.num_moved
            end = min(start + arena.piece_bytes, arena.slot_bytes)
            over = arena.fill(self._tier, transfer.layer, transfer.expert, transfer.slot, start, end)
            with self._changed:
                self.num_pieces += 1
                self._control.moved(transfer, end - start)
                self._pace.copied(*over)
                self.copy_seconds += over[1]
                if end == arena.slot_bytes:
                    self._control.finish(transfer)
                    self._changed.notify()
                    self._wake_copiers()
                    return
                if self._closing or self._control.must_stop(transfer):
                    self._control.stop(transfer)
                    self._wake_copiers()
                    return


class Pace:
    """The speed of the link relative to the computation: means over the last hundred or so observations."""

    def __init__(self, expert_bytes: int) -> None:
        self._expert_bytes = expert_bytes
        self._last_access: float | None = None
        self._layer_seconds: float | None = None
        self._seconds_per_byte: float | None = None

    @property
    def load_seconds(self) -> float:
        """The seconds that the link takes for an expert; 0 until some were measured."""
        return (self._seconds_per_byte or 0.0) * self._expert_bytes

    @property
    def loads_per_layer(self) -> float:
        """The number of experts that the link loads while one layer is computed; 1 until both were measured."""
        if self._layer_seconds is None or self._seconds_per_byte is None:
            return 1.0
        return self._layer_seconds / self.load_seconds

    def access(self, now: float) -> None:
        """Record that a layer's event begins. now: seconds, without the waiting for experts."""
        if self._last_access is not None:
            self._layer_seconds = _smoothed(self._layer_seconds, now - self._last_access)
        self._last_access = now

    def copied(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self._seconds_per_byte = _smoothed(self._seconds_per_byte, seconds / num_bytes)


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
