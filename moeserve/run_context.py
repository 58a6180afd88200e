"""One run of a service: the settings that all of its processes share, and the names of its sockets and files.

The supervisor hands the context to every process as a file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from moeserve.config import VERSION, ServeConfig
from moeserve.wire import PROTOCOL_VERSION, EngineReady, Suspicion, pack, unpack

ANY_NAME = "*"  # among the served names: requests may name any model


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One run of one service and the addresses of its sockets, as a file in its private run directory (mode 0700).

    The file holds secrets. `incarnation` numbers the engine's life: it is in every frame and in the socket paths. On
    another node than node 0 it is the last life of the engine that ranks of the node were in, 0 for none.
    `secret` (hex) keys the cache namespaces of API keys. `Hello` compares `model_hash`. `meets_in_store`: not all ranks
    were started with this context, so they find each other in torchrun's store. `suspicion`: from the engines before.
    `response_store`: the file that outlives the run; None for one that does not.
    """

    config: ServeConfig
    model_dir: str
    model_hash: str
    run_dir: str
    incarnation: int
    secret: str
    served_model_names: tuple[str, ...]
    meets_in_store: bool = False
    suspicion: Suspicion = field(default_factory=Suspicion)
    response_store: str | None = None

    @property
    def takes_any_name(self) -> bool:
        """Return whether requests may name any model: `*` is among the names that the user gives."""
        return ANY_NAME in self.config.served_model_name

    @property
    def engine_address(self) -> str:
        """Frontends' DEALER sockets connect here; the engine's ROUTER binds."""
        return f"ipc://{self.run_dir}/engine.{self.incarnation}"

    @property
    def heartbeat_address(self) -> str:
        """The engine's PUB binds here; frontends and the supervisor subscribe."""
        return f"ipc://{self.run_dir}/heartbeat.{self.incarnation}"

    def results_address(self, loading: bool) -> str:
        """Rank 0's PULL binds here; the PUSH sockets of the other ranks connect. loading: while ranks load."""
        return f"ipc://{self.run_dir}/{'load' if loading else 'results'}.{self.incarnation}"

    def steps_address(self, rank: int, loading: bool) -> str:
        """Rank 0's PUSH for the steps of a rank binds here; that rank's PULL connects. loading: while ranks load."""
        return f"ipc://{self.run_dir}/{'load' if loading else 'steps'}.{rank}.{self.incarnation}"

    @property
    def rendezvous(self) -> Path:
        """The file in which ranks find each other for their collectives."""
        return Path(self.run_dir) / f"collectives.{self.incarnation}"

    @property
    def work_record(self) -> Path:
        """The file in which the engine names the requests that it is working on."""
        return Path(self.run_dir) / f"work.{self.incarnation}"

    @property
    def frontend_failure(self) -> Path:
        """The file with a sentence that says why the frontend could not start, if it failed to."""
        return Path(self.run_dir) / "frontend.failure"

    @property
    def ready_file(self) -> Path:
        """The file with the first message of the newest engine that was ready, for frontends that begin without one."""
        return Path(self.run_dir) / "ready"

    @property
    def shared_metrics(self) -> Path | None:
        """The folder in which several frontends count together; None for a single frontend."""
        return Path(self.run_dir) / "metrics" if self.config.num_frontends > 1 else None

    @property
    def load_file(self) -> Path | None:
        """The file in which several frontends share their load; None for a single frontend."""
        return Path(self.run_dir) / "load" if self.config.num_frontends > 1 else None

    @property
    def reader(self) -> str:
        """A name (hex) of all that reading a stored answer depends on: the model, its parsers, this program."""
        facts = (
            VERSION,
            str(PROTOCOL_VERSION),
            self.model_hash,
            self.config.tool_call_parser,
            self.config.reasoning_parser,
        )
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]

    @property
    def store_file(self) -> Path:
        """The file in which all frontends keep responses."""
        return Path(self.response_store or Path(self.run_dir) / "responses")

    @property
    def file(self) -> Path:
        return Path(self.run_dir) / f"run.{self.incarnation}.json"

    def save(self) -> Path:
        """Write the file with mode 0600 and return its path."""
        path = self.file
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(self))
        return path


def keep_ready(run: RunContext, ready: EngineReady) -> None:
    """Write the first message of an engine to `RunContext.ready_file`, whole or not at all."""
    partial = run.ready_file.with_suffix(".partial")
    partial.touch(mode=0o600)
    partial.write_bytes(pack(ready))
    partial.replace(run.ready_file)


def load_ready(run: RunContext) -> EngineReady | None:
    """Return the message that the newest engine has kept, None if none was ready yet."""
    try:
        return unpack(run.ready_file.read_bytes(), EngineReady)
    except FileNotFoundError:
        return None


def load_run_context(path: str | Path) -> RunContext:
    """Return the context that `RunContext.save` wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=RunContext)
