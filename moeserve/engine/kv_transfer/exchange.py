"""The transfer of KV between services, as the engine's loop sees it, and how it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError, cache_root
from moeserve.engine.kv_disk.copier import as_block_memory
from moeserve.engine.kv_disk.opening import fingerprint_of_rank
from moeserve.engine.kv_transfer.answers import Coming
from moeserve.engine.kv_transfer.fetcher import BlockFetcher
from moeserve.engine.kv_transfer.server import BlockServer
from moeserve.engine.rank import Rank, StepProgress
from moeserve.engine.ranks.meeting import Gatekeeper, load_keys
from moeserve.kv_transfer import TicketOffice, parse_kv_transfer
from moeserve.model.spec import DecoderSpec
from moeserve.scheduling.kv_transfer import KvOffers
from moeserve.scheduling.scheduler import Scheduler
from moeserve.wire import RunContext

_FOLDER = "kv-transfer"  # in the cache folder: hashes of weights

log = structlog.get_logger(__name__)


class OfferedBlocks:
    """Implements `moeserve.engine.kv_transfer.answers.Offered`."""

    def __init__(self, offers: KvOffers, progress: StepProgress, block_size: int, num_arrays: Sequence[int]) -> None:
        """num_arrays: of KV memory, that the first 0, 1, 2 and so on layers fill."""
        self.blocks = offers.blocks
        self.is_growing = offers.is_growing
        self._offers = offers
        self._progress = progress
        self._block_size = block_size
        self._num_arrays = num_arrays

    def coming(self, ticket_id: str) -> Coming | None:
        progress, request_id = self._progress, self._offers.computed_for(ticket_id)
        plan, num_layers = progress.plan, min(progress.num_layers, len(self._num_arrays) - 1)
        if plan is None or request_id is None:
            return None
        chunk = next((chunk for chunk in plan.chunks if chunk.request_id == request_id), None)
        if chunk is None:
            return None
        stop = (chunk.start + len(chunk.token_ids)) // self._block_size
        return Coming(plan, chunk.block_table[:stop], self._num_arrays[num_layers])

    def is_present(self, step: object) -> bool:
        return self._progress.plan is step

    def is_last(self, step: object) -> bool:
        return self._progress.last_plan is step


def arrays_of_layers(rank: Rank) -> list[int]:
    """Return how many arrays of KV memory the first 0, 1, 2 and so on layers fill; 0 alone where that is not known."""
    assert rank.kv_pool is not None
    layers = rank.kv_pool.layers if isinstance(rank.model.spec, DecoderSpec) else []
    return list(accumulate((1 if values is None else 2 for _, values in layers), initial=0))


class KvExchange:
    """Carries out the fetches of a scheduler, and serves the blocks that it holds for others."""

    def __init__(self, context: RunContext, rank: Rank, setting: str) -> None:
        """Bind the port. Raise ConfigError, one sentence, if that fails or the key cannot be read."""
        assert rank.kv_pool is not None
        config = parse_kv_transfer(setting)
        self._sockets: zmq.Context[Any] = zmq.Context()
        keys = load_keys(Path(config.key_file), "key_file of --kv-transfer-config,")
        root = cache_root() / _FOLDER
        memory = as_block_memory(rank.kv_pool.layer_bytes())
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            fingerprint = fingerprint_of_rank(context, rank, root)
        except OSError as error:
            raise ConfigError(f"--kv-transfer-config: {root} cannot be used: {error.strerror or error}.") from error
        self._gatekeeper = Gatekeeper(self._sockets, keys)
        self._progress, self._block_size = rank.progress, context.config.block_size
        self._num_arrays = arrays_of_layers(rank)
        self._server = BlockServer(self._sockets, keys, f"tcp://{config.kv_ip}:{config.kv_port or '*'}", memory)
        self._fetcher = BlockFetcher(self._sockets, keys, memory)
        self.office = TicketOffice(
            keys.secret,
            fingerprint,
            self._block_size,
            config.kv_ip,
            self._server.port,
            lease_s=config.lease_seconds,
            issues_early=config.early,
        )
        if not config.is_local:
            log.info("kv_leaves_the_machine", consequence="holders of the key can read prompts")

    def serve(self, scheduler: Scheduler) -> None:
        """Begin to serve the blocks that the scheduler holds."""
        assert scheduler.transfer is not None
        self._server.serve(OfferedBlocks(scheduler.transfer.offers, self._progress, self._block_size, self._num_arrays))

    def send_computed(self, scheduler: Scheduler) -> None:
        """Have the blocks of a committed step sent to services that wait for them."""
        scheduler.grow_offers()
        self._tell_news(scheduler)

    def turn(self, scheduler: Scheduler, seconds: float = 0.0) -> None:
        """Report finished fetches to the scheduler, and begin new fetches. Wait up to `seconds` for one that ends."""
        for ticket_id, is_last in self._server.take_fetched():
            scheduler.record_fetched(ticket_id, is_last=is_last)
        for result in self._fetcher.take(seconds):
            scheduler.waiting.end_fetch(result)
        scheduler.expire_offers()
        self._tell_news(scheduler)
        for job in scheduler.waiting.take_fetches():
            self._fetcher.start(job)

    def _tell_news(self, scheduler: Scheduler) -> None:
        assert scheduler.transfer is not None
        if scheduler.transfer.offers.take_news():
            self._server.look_again()

    def close(self) -> None:
        """End all threads and close the sockets."""
        self._fetcher.close()
        self._server.stop()
        self._gatekeeper.close()
        self._sockets.term()
