"""The transfer of KV between services, as the engine's loop sees it, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError, cache_root
from moeserve.engine.curve import Gatekeeper, load_keys
from moeserve.engine.fingerprint import fingerprint_of_kv
from moeserve.engine.kv.disk.copier import as_block_memory
from moeserve.engine.kv.transfer.fetcher import BlockFetcher
from moeserve.engine.kv.transfer.server import BlockServer
from moeserve.engine.rank import Rank
from moeserve.kv_transfer import TicketOffice, parse_kv_transfer
from moeserve.run_context import RunContext
from moeserve.scheduling.kv_transfer import KvFetches, KvOffers
from moeserve.scheduling.parts import Part
from moeserve.scheduling.scheduler import Scheduler
from moeserve.wire import FeatureSamples
from radix_cache import PrefixCache

_FOLDER = "kv-transfer"  # in the cache folder: hashes of weights

log = structlog.get_logger(__name__)


class KvLinks:
    """The sockets and threads that fetch blocks from other services and serve the blocks that are held for them.

    `offers` and `fetches` are the scheduler's side of both. `block_bytes`: of KV.
    """

    def __init__(
        self, context: RunContext, rank: Rank, setting: str, cache: PrefixCache, compute_s: Callable[[int, int], float]
    ) -> None:
        """Bind the port. cache: of the only rank. compute_s: see `KvFetches`.

        Raise ConfigError, one sentence, if that fails or the key cannot be read."""
        assert rank.kv_pool is not None
        config = parse_kv_transfer(setting)
        self._sockets: zmq.Context[Any] = zmq.Context()
        keys = load_keys(Path(config.key_file), "key_file of --kv-transfer-config,")
        root = cache_root() / _FOLDER
        memory = as_block_memory(rank.kv_pool.layer_bytes())
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            fingerprint = fingerprint_of_kv(context, rank, root)
        except OSError as error:
            raise ConfigError(f"--kv-transfer-config: {root} cannot be used: {error.strerror or error}.") from error
        self._gatekeeper = Gatekeeper(self._sockets, keys)
        self.server = BlockServer(self._sockets, keys, f"tcp://{config.kv_ip}:{config.kv_port or '*'}", memory)
        self.fetcher = BlockFetcher(self._sockets, keys, memory)
        office = TicketOffice(
            keys.secret,
            fingerprint,
            context.config.block_size,
            config.kv_ip,
            self.server.port,
            lease_s=config.lease_seconds,
        )
        self.offers = KvOffers(cache, office)
        self.fetches = KvFetches(cache, office, compute_s)
        self.server.serve(self.offers.blocks)
        self.block_bytes = rank.model.kv_bytes // rank.model.kv.num_blocks
        if not config.is_local:
            log.info("kv_leaves_the_machine", consequence="holders of the key can read prompts")

    def close(self) -> None:
        """End all threads and close the sockets."""
        self.fetcher.close()
        self.server.stop()
        self._gatekeeper.close()
        self._sockets.term()


class KvExchange(Part):
    """Ends the offers of a scheduler as other services fetch them, and has the figures of all transfers."""

    def __init__(self, links: KvLinks, scheduler: Scheduler) -> None:
        """links: its offers and fetches are parts of the scheduler."""
        self._links = links
        self._offers, self._fetches = links.offers, links.fetches
        self._scheduler = scheduler
        self._block_bytes = links.block_bytes
        self._unlike: set[tuple[str, int]] = set()

    def turn(self) -> None:
        scheduler = self._scheduler
        for ticket_id, is_last in self._links.server.take_fetched():
            self._offers.record_fetch(ticket_id, scheduler.now, is_last=is_last)
        self._offers.expire(scheduler.now, scheduler.lacking)
        self._tell_unlike(self._fetches.unlike)

    def samples(self) -> FeatureSamples:
        offers, counters = self._offers, self._fetches.counters
        return {
            "moeserve_kv_transfer_held_blocks": [[offers.num_held]],
            "moeserve_kv_transfer_offers": [[offers.num_made]],
            "moeserve_kv_transfer_expired": [[offers.num_expired]],
            "moeserve_kv_transfer_tokens": [[counters.num_tokens]],
            "moeserve_kv_transfer_bytes": [[counters.num_blocks * self._block_bytes]],
            "moeserve_kv_transfer_seconds": [[round(counters.seconds, 6)]],
            "moeserve_kv_transfer_failed": [[reason, count] for reason, count in sorted(counters.failures.items())],
        }

    def _tell_unlike(self, services: Set[tuple[str, int]]) -> None:
        """Log once each service whose tickets serve nothing here."""
        for host, port in services - self._unlike:
            log.warning(
                "kv_ticket_of_unlike_service", host=host, port=port, consequence="its prompts are computed here"
            )
        self._unlike |= services
