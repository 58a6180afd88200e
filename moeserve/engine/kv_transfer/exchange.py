"""The transfer of KV between services, as the engine's loop sees it, and how it is opened."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import structlog
import zmq

from moeserve.config import ConfigError, cache_root
from moeserve.engine.fingerprint import fingerprint_of_kv
from moeserve.engine.kv_disk.copier import as_block_memory
from moeserve.engine.kv_transfer.fetcher import BlockFetcher
from moeserve.engine.kv_transfer.server import BlockServer
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.meeting import Gatekeeper, load_keys
from moeserve.kv_transfer import TicketOffice, parse_kv_transfer
from moeserve.scheduling.scheduler import Scheduler
from moeserve.wire import RunContext

_FOLDER = "kv-transfer"  # in the cache folder: hashes of weights

log = structlog.get_logger(__name__)


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
            fingerprint = fingerprint_of_kv(context, rank, root)
        except OSError as error:
            raise ConfigError(f"--kv-transfer-config: {root} cannot be used: {error.strerror or error}.") from error
        self._gatekeeper = Gatekeeper(self._sockets, keys)
        self._unlike: set[tuple[str, int]] = set()
        self._server = BlockServer(self._sockets, keys, f"tcp://{config.kv_ip}:{config.kv_port or '*'}", memory)
        self._fetcher = BlockFetcher(self._sockets, keys, memory)
        self.office = TicketOffice(
            keys.secret,
            fingerprint,
            context.config.block_size,
            config.kv_ip,
            self._server.port,
            lease_s=config.lease_seconds,
        )
        if not config.is_local:
            log.info("kv_leaves_the_machine", consequence="holders of the key can read prompts")

    def serve(self, scheduler: Scheduler) -> None:
        """Begin to serve the blocks that the scheduler holds."""
        assert scheduler.transfer is not None
        self._server.serve(scheduler.transfer.offers.blocks)

    def turn(self, scheduler: Scheduler, seconds: float = 0.0) -> None:
        """Report finished fetches to the scheduler, and begin new fetches. Wait up to `seconds` for one that ends."""
        for ticket_id, is_last in self._server.take_fetched():
            scheduler.record_fetched(ticket_id, is_last=is_last)
        for result in self._fetcher.take(seconds):
            scheduler.waiting.end_fetch(result)
        scheduler.expire_offers()
        if scheduler.transfer is not None:
            self._tell_unlike(scheduler.transfer.fetches.unlike)
        for job in scheduler.waiting.take_fetches():
            self._fetcher.start(job)

    def _tell_unlike(self, services: Set[tuple[str, int]]) -> None:
        """Log once each service whose tickets serve nothing here."""
        for host, port in services - self._unlike:
            log.warning(
                "kv_ticket_of_unlike_service", host=host, port=port, consequence="its prompts are computed here"
            )
        self._unlike |= services

    def close(self) -> None:
        """End all threads and close the sockets."""
        self._fetcher.close()
        self._server.stop()
        self._gatekeeper.close()
        self._sockets.term()
