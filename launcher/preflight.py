"""Checks before anything is started: the machine, the settings, the installed packages, the port."""

from __future__ import annotations

import errno
import os
import resource
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from math import ceil
from pathlib import Path

from moeserve.config import ConfigError, ServeConfig, refuse_changed
from moeserve.device import refuse_gpu_settings
from moeserve.engine.curve import load_keys
from moeserve.engine.experts.settings import check_experts, plan_placement
from moeserve.engine.ranks.meeting import is_own, resolve
from moeserve.engine.ranks.settings import check_pipeline, check_tensor, layers_of_ranks
from moeserve.frontend.keys import load_keys as load_api_keys
from moeserve.frontend.limits import connections_within
from moeserve.frontend.routes.cache import load_public_prefixes
from moeserve.model.families import build_spec
from moeserve.model.families import load_config as load_model_config
from moeserve.model.shards import check_shards
from moeserve.model.spec import ModelError
from moeserve.model.stages import stages_of
from moeserve.settings.kv_events import parse_kv_events

# A streamed token takes some 50 µs of an HTTP process (docs/benchmarks/service.md); the engine's threads take the other
# cores.
_CORES_PER_FRONTEND = 8
_STREAMS_PER_FRONTEND = 32  # streams at once for each HTTP process: with 200 tokens/s each they take a third of a core
_MOST_FRONTENDS = 8
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_SHORTEST_TIMEOUT_OF_RANKS = 4.0
_SHORT_SLEEP_S = 60.0  # s; a shorter --sleep-after is taken for one that forgot its unit
# A service of one rank starts with 40.
_LEAST_OPEN_FILES = 64
_FOR_SEVERAL_RANKS = ("dispatch", "combine_dtype", "placement", "num_redundant_experts", "rebalance_interval")
_FOR_EXPERT_MEMORY = ("expert_policy", "expert_compute", "expert_prefetch")


class LaunchError(Exception):
    """The service cannot start or go on. The message, one sentence, names the fault and the remedy."""


def check_machine() -> None:
    """Raise LaunchError where moeserve cannot run at all."""
    if sys.platform != "linux":
        raise LaunchError(f"moeserve runs on Linux only; this is {sys.platform} (a Linux container works).")
    if not hasattr(os, "pidfd_open"):
        raise LaunchError("This Python cannot watch child processes (os.pidfd_open is missing): use another build.")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_OPEN_FILES:
        raise LaunchError(
            f"A process may open only {limit} files here, and moeserve needs {_LEAST_OPEN_FILES} (ulimit -n)."
        )


def odd_settings(config: ServeConfig) -> Iterator[str]:
    """Yield a sentence for each setting that is served and hardly meant, or that the machine does not allow."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connections_within(limit, config.max_connections)
    if most != config.max_connections:
        yield (
            f"--max-connections is lowered from {config.max_connections} to {most}: "
            f"a process may open only {limit} files here (ulimit -Hn)."
        )
    if config.threads > (cores := usable_cores()):
        yield f"--threads {config.threads} is more than the {cores} cores that this process may use, and so is slower."
    if config.sleep_after is not None and config.sleep_after < _SHORT_SLEEP_S:
        yield (
            f"--sleep-after {config.sleep_after:g} is in seconds: the model is loaded anew after each pause of that "
            "length; 15m is minutes."
        )


def check_all(config: ServeConfig) -> None:
    """Raise ConfigError or LaunchError for settings, files that they name, and packages that cannot be used."""
    check_settings(config)
    if config.node_rank == 0:
        load_api_keys(config.api_key, config.api_key_file)
        load_public_prefixes(config.public_prefixes)
    check_nodes(config)
    check_packages()


def check_settings(config: ServeConfig) -> None:
    """Raise ConfigError for settings that contradict each other."""
    if config.expert_parallel_size == 1:
        refuse_changed(config, _FOR_SEVERAL_RANKS, "--expert-parallel-size of at least 2")
    if config.expert_memory is None:
        refuse_changed(config, _FOR_EXPERT_MEMORY, "--expert-memory: without it all experts are in memory")
    if config.device != "cuda":
        refuse_gpu_settings(config, "--device cuda")
    check_experts(config)
    check_pipeline(config)
    check_tensor(config)
    if not config.enable_prefix_caching and parse_kv_events(config.kv_events_config).is_on:
        raise ConfigError("--kv-events-config needs --enable-prefix-caching: events name cached blocks.")
    if not config.rebalance_interval:
        refuse_changed(config, ("rebalance_threshold",), "--rebalance-interval")
    if config.rebalance_interval and not config.record_experts:
        raise ConfigError("--rebalance-interval needs --record-experts: it goes by what tokens choose.")
    if config.num_ranks > 1 and config.engine_timeout < _SHORTEST_TIMEOUT_OF_RANKS:
        raise ConfigError(
            f"--engine-timeout {config.engine_timeout:g} is too short to tell which of several ranks hangs: "
            f"use at least {_SHORTEST_TIMEOUT_OF_RANKS:g}."
        )


def check_shares(folder: Path, config: ServeConfig) -> None:
    """Raise ConfigError where the ranks cannot share the model in a folder: its experts, layers or heads."""
    if config.num_ranks == 1 or config.model_impl == "transformers":
        return
    try:
        spec = build_spec(load_model_config(folder))
    except ModelError:
        return  # of a type on transformers' code, or one that is refused once it is loaded
    counts = layers_of_ranks(config, [1] * spec.num_layers, spec.joined_layers)
    if config.expert_parallel_size > 1:
        plan_placement(folder, spec, config)
    try:
        if config.tensor_parallel_size > 1:
            check_shards(spec, config.tensor_parallel_size)
        if config.pipeline_parallel_size > 1:
            # Only the start knows how it splits layers by their sizes.
            for stage in stages_of(counts if config.layers_per_rank is not None else [spec.num_layers]):
                spec.of_layers(stage)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def check_nodes(config: ServeConfig) -> None:
    """Raise ConfigError for settings of several nodes that are missing, wrong, or given for one node."""
    if config.nnodes == 1:
        for name in ("node_rank", "rdzv_endpoint", "curve_key_file"):
            if getattr(config, name):
                raise ConfigError(f"--{name.replace('_', '-')} is for several nodes: give --nnodes too.")
        return
    if config.num_ranks == 1:
        raise ConfigError(
            f"--nnodes {config.nnodes} needs a rank for each node: --expert-parallel-size, --pipeline-parallel-size "
            "or --tensor-parallel-size."
        )
    if config.num_ranks % config.nnodes:
        sizes = {way: getattr(config, f"{way}_parallel_size") for way in ("pipeline", "expert", "tensor")}
        given = " ".join(f"--{way}-parallel-size {size}" for way, size in sizes.items() if size > 1)
        raise ConfigError(f"{given}: {config.num_ranks} ranks cannot be shared equally by {config.nnodes} nodes.")
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"--node-rank {config.node_rank}: {config.nnodes} nodes count from 0 to {config.nnodes - 1}.")
    host, _, port = (config.rdzv_endpoint or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError("--nnodes needs --rdzv-endpoint HOST:PORT, the same on all nodes, HOST being node 0.")
    if config.node_rank == 0 and not is_own(resolve(host)):
        raise ConfigError(f"--rdzv-endpoint: {host} is no address of this machine, which is node 0.")
    if config.curve_key_file is None:
        raise ConfigError(
            "--nnodes needs --curve-key-file FILE, the same key on all nodes: moeserve curve-key FILE makes one."
        )
    load_keys(Path(config.curve_key_file))


def check_packages() -> None:
    """Raise LaunchError if another distribution owns the import name `kernels`.

    transformers imports that distribution where it finds its metadata, and its files and moeserve's would overwrite
    each other.
    """
    try:
        other = distribution("kernels")
    except PackageNotFoundError:
        return
    raise LaunchError(
        f"The package 'kernels' {other.version} is installed beside moeserve, which has a package of the same name: "
        "remove it with 'pip uninstall kernels', then reinstall moeserve."
    )


def frontends_for(cores: int, num_streams: int) -> int:
    """Return how many HTTP processes `--num-frontends auto` starts. num_streams: the most requests that run at once."""
    return max(1, min(_MOST_FRONTENDS, cores // _CORES_PER_FRONTEND, ceil(num_streams / _STREAMS_PER_FRONTEND)))


def usable_cores(cpu_quota: Path = _CGROUP_CPU) -> int:
    """Return how many cores this process may use: its affinity, cut to the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


_BACKLOG = 2048  # connections that the system queues until an HTTP process accepts them


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket. Clients that connect early wait in its backlog until the frontend accepts.

    Raise LaunchError when the address is not usable.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"The host name {host!r} cannot be resolved: {reason}.") from None
    family, kind, protocol, _, address = candidates[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two sockets may share an address while neither listens: only listening makes it ours.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_bind_failure(host, port, error)) from None
    return listener


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def reachable_address(listener: socket.socket) -> tuple[str, int]:
    """Return host and port under which this machine itself reaches the socket."""
    host, port = listener.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


def url(address: tuple[str, int]) -> str:
    """Return `http://host:port`."""
    host, port = address
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another process: stop that one or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs more rights than this user has: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"This machine has no address {host}: choose one of its own with --host."
    return f"Cannot listen on {host} port {port}: {error.strerror}."
