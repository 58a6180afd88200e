"""What the supervisor hands to the processes of one running service, as a file in its private run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from moeserve.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One life of one service. The file holds secrets; its directory is 0700.

    `incarnation` numbers the engine's life: it is in every frame and in the socket paths. `secret` (hex) keys the cache
    namespaces of API keys. `model_hash` is compared in `Hello`. `meets_in_store`: not all ranks were started with this
    context, so they find each other in torchrun's store.
    """

    config: ServeConfig
    model_dir: str
    model_hash: str
    run_dir: str
    incarnation: int
    secret: str
    served_model_names: tuple[str, ...]
    meets_in_store: bool = False

    @property
    def engine_address(self) -> str:
        """Frontends' DEALER sockets connect here; the engine's ROUTER binds."""
        return f"ipc://{self.run_dir}/engine.{self.incarnation}"

    @property
    def heartbeat_address(self) -> str:
        """The engine's PUB binds here; frontends and the supervisor subscribe."""
        return f"ipc://{self.run_dir}/heartbeat.{self.incarnation}"

    @property
    def results_address(self) -> str:
        """Rank 0's PULL binds here; the PUSH sockets of the other ranks connect."""
        return f"ipc://{self.run_dir}/results.{self.incarnation}"

    def steps_address(self, rank: int) -> str:
        """Rank 0's PUSH for the steps of a rank binds here; that rank's PULL connects."""
        return f"ipc://{self.run_dir}/steps.{rank}.{self.incarnation}"

    @property
    def rendezvous(self) -> Path:
        """The file in which ranks find each other for their collectives."""
        return Path(self.run_dir) / f"collectives.{self.incarnation}"

    def save(self) -> Path:
        """Writes the file with mode 0600 and returns its path."""
        path = Path(self.run_dir) / f"run.{self.incarnation}.json"
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))
        return path


def load_run_context(path: str | Path) -> RunContext:
    """The context that `save` wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=RunContext)
