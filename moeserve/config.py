"""The settings of a service: one dataclass for the command line, the environment, a TOML file and the docs.

`moeserve serve --help` prints each field's `help`. `load_config` takes each value from the first source that gives it:
flags, `MOESERVE_...` in the environment, the TOML file, the default. Sizes are bytes; in text, `512MiB` and `2GB` are
understood too. This module needs the standard library alone.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from moeserve.kv_transfer import parse_kv_transfer
from moeserve.settings.drafts import parse_speculative
from moeserve.settings.generation import parse_effort_budgets, parse_generation
from moeserve.settings.kv_events import parse_kv_events
from moeserve.settings.layers import parse_layers
from moeserve.settings.models import read_model
from moeserve.settings.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from moeserve.settings.quantities import parse_duration, parse_limits, parse_size
from moeserve.settings.weights import WeightForms, parse_quantization

# The packaging reads it too. Skip versions 0.18.2 to 0.19: with such a version transformers mistakes the distribution
# that has the import name `kernels` for its optional kernel loader.
VERSION = "0.1.0"

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one sentence for the user."""


def setting(default: Any, help: str, *, group: str, **extra: Any) -> Any:
    """Return a dataclass field with its help text and heading.

    `extra` may hold `choices`, `minimum`, `maximum`, `metavar` and `secret`; `on_gpu`, the default on a GPU; `parse`,
    which makes the value out of what a source gives; and `check`, which raises ValueError, a clause, for a text that
    cannot be used.
    """
    metadata = {"help": help, "group": group, **extra}
    if isinstance(default, tuple):
        return field(default=default, metadata={**metadata, "multiple": True})
    return field(default=default, metadata=metadata)


class _NotThat(Exception):
    """A source gives no value of the setting's type."""


def _as_bool(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    word = given.strip().lower() if isinstance(given, str) else ""
    if word not in _TRUE | _FALSE:
        raise _NotThat
    return word in _TRUE


def _as_int(given: Any) -> int:
    try:
        if not isinstance(given, bool | float):
            return int(given)
    except (TypeError, ValueError):
        pass
    raise _NotThat


def _as_float(given: Any) -> float:
    try:
        if not isinstance(given, bool) and math.isfinite(value := float(given)):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise _NotThat


def _as_prose(given: Any) -> str:
    """Return a text, whose white space stays."""
    if not isinstance(given, str) or not given.strip():
        raise _NotThat
    return given


def _as_text(given: Any) -> str:
    return _as_prose(given).strip()


def _as_count(given: Any) -> int:
    """Return a number; `auto` is 0."""
    return 0 if given == "auto" else _as_int(given)


def _check_slo(text: str) -> None:
    if "ttft" not in parse_limits(text, ("ttft", "tpot")):
        raise ValueError("ttft is missing")


def _check_proxy(text: str) -> None:
    if text != "*":
        ip_network(text)


_model, _ranks, _nodes, _memory, _experts, _expert_memory, _http, _operation = (
    partial(setting, group=heading)
    for heading in (
        "Model",
        "Several ranks",
        "Several nodes",
        "Memory and scheduling",
        "Experts",
        "Expert memory",
        "HTTP",
        "Operation",
    )
)

# Variables that are no settings: of the caches, of kernels, and of the commands that talk to a server.
_OTHER_VARIABLES = {"ADMIN_KEY", "AGENT_KEY", "CACHE", "CPU_KERNELS", "CLIENTS_DIR", "TEST_CHROMIUM"}
_SERVICE_LINK = re.compile(r"MOESERVE_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Every setting of `moeserve serve`."""

    model: str | None = _model(
        None,
        "Folder, GGUF file, model of the hub (owner/name, or owner/name:Q4_K_M of a repository of GGUF files), `demo` "
        "or `demo-split`; the demo if left out.",
        parse=read_model,
    )
    served_model_name: tuple[str, ...] = _model((), "Name under which clients ask for the model; `*` takes any.")
    revision: str | None = _model(None, "Branch, tag or commit of the hub model.")
    offline: bool = _model(False, "Use only files that are already on disk.")
    device: str = _model(
        "auto",
        "Where the model runs; auto is a GPU that passes its checks and that the model fits, else the CPU.",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = _model(
        "auto",
        "Weights and activations; auto is float32 on a CPU and bfloat16 on a GPU. On a CPU bfloat16 rounds matrix "
        "products only; the rest stays float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    model_impl: str = _model(
        "auto",
        "Code that computes the model: our own (native), or transformers' over our memory, attention and experts; auto "
        "is native where a type has it.",
        choices=("auto", "native", "transformers"),
    )
    quantization: str = _model(
        "none",
        "Form to which weights are rounded while they are loaded: int8 or int4 (some matrices then have 6 or 8 bits), "
        "on a CPU; experts=FORM rounds the experts alone, int8,experts=int4 gives them another form than the rest. A "
        "GPU rounds experts alone, to int8, fp8 or int4. none keeps the checkpoint's.",
        check=parse_quantization,
        metavar="FORM[,experts=FORM]",
    )
    arithmetic: str = _model(
        "auto",
        "How quantised weights multiply: on a CPU int8 rounds activations to 8 bits, exact keeps them in float32, and "
        "auto is int8; on a GPU exact keeps activations as they are, and auto rounds them to FP8 where the checkpoint "
        "says so and the GPU multiplies FP8.",
        choices=("auto", "int8", "exact"),
    )
    reproducible: bool = _model(
        False,
        "Compute the bits that every kind of CPU computes with this flag; costs time on Zen 4 and 5 where products or "
        "keys and values are in bfloat16. See reproducible.md.",
    )
    threads: int = _model(0, "Threads of each rank; 0 shares out all cores this process may use.", minimum=0)
    max_model_len: int | None = _model(None, "Longest prompt plus output, in tokens.", minimum=1)
    default_max_tokens: int | None = _model(
        None,
        "Most tokens of an answer whose request sets no bound; 0 is all that the context leaves. By default "
        "`max_new_tokens` of the model's generation_config.json, 1024 for the demo, and else no bound.",
        minimum=0,
    )
    override_generation_config: str = _model(
        "{}",
        "JSON object of values that go before the model's generation_config.json, as vLLM means it: temperature, "
        'top_p, top_k, min_p, repetition_penalty; {"max_new_tokens": N} bounds every answer, whatever its request asks '
        "for.",
        check=parse_generation,
        metavar="JSON",
    )
    seed: int = _model(0, "Base of the seeds drawn for requests that bring none.", minimum=0)
    pipeline_parallel_size: int = _ranks(
        1, "Ranks (processes) that share the layers: each holds some that follow each other.", minimum=1, maximum=64
    )
    layers_per_rank: str | None = _ranks(
        None,
        "Numbers of layers, as 20,28, on the ranks of a pipeline; by default the largest part is as small as possible.",
        check=parse_layers,
        metavar="N,N",
    )
    tensor_parallel_size: int = _ranks(
        1,
        "Ranks (processes) that share every layer: each holds some heads, channels and experts of it.",
        minimum=1,
        maximum=64,
    )
    expert_parallel_size: int = _ranks(
        1, "Ranks (processes) that share the experts and the requests.", minimum=1, maximum=64
    )
    bind_cores: bool = _ranks(True, "Give each rank cores of its own, where the ranks fill the machine.")
    dispatch: str = _experts(
        "auto",
        "How rows reach the experts of other ranks; auto measures all at start-up.",
        choices=("auto", "allgather", "alltoall", "fixed"),
    )
    combine_dtype: str = _experts(
        "float32",
        "Dtype of a row's parts on their way home from other ranks; bfloat16 halves these bytes and rounds the parts, "
        "which are added in float32.",
        choices=("float32", "bfloat16"),
    )
    placement: str = _experts(
        "contiguous",
        "Which ranks hold which experts; the last two learn it from the statistics.",
        choices=("contiguous", "round-robin", "balanced", "coactivation"),
    )
    num_redundant_experts: int = _experts(
        0, "Replicas per layer, of its busiest experts; each rank holds equally many.", minimum=0
    )
    record_experts: bool = _experts(True, "Gather which experts tokens choose, for `/v1/experts` and for placement.")
    expert_statistics: str | None = _experts(
        None, "File that these statistics begin with, if it is there, and are saved to."
    )
    expert_trace: str | None = _experts(
        None, "File for a trace of the routing from the start on, bounded, without token ids."
    )
    rebalance_interval: int = _experts(
        0, "Steps between decisions to place a layer anew while serving; 0 leaves all where it is.", minimum=0
    )
    rebalance_threshold: float = _experts(
        0.05,
        "Gain in balancedness (mean over maximum of the ranks' load) from which a layer is placed anew.",
        minimum=0,
        maximum=1,
        metavar="SHARE",
    )
    nnodes: int = _nodes(1, "Machines (nodes) that share the ranks equally.", minimum=1)
    node_rank: int = _nodes(0, "Number of this node; node 0 serves HTTP.", minimum=0)
    rdzv_endpoint: str | None = _nodes(None, "Where the nodes meet: HOST:PORT, HOST being an address of node 0.")
    curve_key_file: str | None = _nodes(None, "Key that all nodes share (moeserve curve-key FILE makes one).")
    block_size: int = _memory(16, "Tokens per KV block.", on_gpu=64, minimum=1, maximum=1024)
    kv_cache_memory: int | None = _memory(
        None,
        "Memory of each rank for KV blocks; by default 0.85 of the memory that is free beside the weights, at most "
        "4 GiB for a demo. It is taken page by page, when first used.",
        parse=parse_size,
        minimum=1,
    )
    state_cache_memory: int | None = _memory(
        None,
        "Memory of each rank for snapshots of recurrent states; by default a quarter of the KV memory.",
        parse=parse_size,
        minimum=1,
    )
    kv_cache_dtype: str = _memory(
        "auto",
        "Dtype of keys and values: float32, bfloat16 or int8 on a CPU, fp8_e4m3 on a GPU; "
        "auto: bfloat16 where a CPU rounds activations, else as activations.",
        choices=("auto", "float32", "bfloat16", "int8", "fp8_e4m3"),
    )
    gpu_memory_utilization: float = _memory(
        0.9,
        "Share of the GPU's memory to use; KV takes what weights and steps leave of it.",
        minimum=0.1,
        maximum=1,
        metavar="SHARE",
    )
    enforce_eager: bool = _memory(False, "Do not capture decode steps on a GPU as CUDA graphs.")
    enable_prefix_caching: bool = _memory(True, "Keep the KV of computed prefixes for later requests.")
    cache_retention_share: float = _memory(
        0.5,
        "Share of the KV blocks that each API key may have retained; a key file can give a key its own.",
        minimum=0,
        maximum=1,
        metavar="SHARE",
    )
    cache_pin_share: float = _memory(
        0.25,
        "Share of the KV blocks that all API keys together may have pinned, each at most half of it; a key file can "
        "give a key its own.",
        minimum=0,
        maximum=1,
        metavar="SHARE",
    )
    kv_host_memory: int | None = _memory(
        None,
        "Memory of the host for KV that a GPU evicts, above --kv-disk-path if there is one, of a single rank; see "
        "prompt-cache.md. On a CPU all KV is in the host's memory anyway (--kv-cache-memory), so a value is refused.",
        parse=parse_size,
        minimum=1,
    )
    kv_disk_path: str | None = _memory(
        None,
        "Folder where cached KV is kept too, so that prefixes outlive a restart or a crash; see prompt-cache.md. A "
        "service on loopback keeps up to 10 GB in the cache folder (auto); none turns it off.",
        metavar="DIR",
    )
    kv_disk_size: int = _memory(
        20 * 10**9,
        "Most bytes of files in --kv-disk-path; beyond it the files used longest ago are removed.",
        parse=parse_size,
        minimum=1,
    )
    kv_disk_age: float = _memory(
        7.0, "Days after its last use when cached KV is removed from --kv-disk-path.", minimum=0, metavar="DAYS"
    )
    kv_overflow: str = _memory(
        "auto",
        "What happens to a request's KV when memory runs out: recompute it, swap it to --kv-disk-path or "
        "--kv-host-memory, or whichever is faster as measured (auto); without either of them it is recomputed.",
        choices=("auto", "recompute", "swap"),
    )
    public_prefixes: str | None = _memory(
        None, "JSON file of prompts whose cached beginnings all API keys share; see prompt-cache.md."
    )
    max_num_seqs: int = _memory(64, "Requests that run at once.", on_gpu=256, minimum=1)
    max_num_batched_tokens: int | None = _memory(
        None,
        "Tokens per step and rank; unless given 256 on a CPU, 2048 in tiles (AMX) of one rank, by its name on a GPU.",
        minimum=1,
    )
    max_num_queued_reqs: int = _memory(256, "Requests that may wait; one more is refused with 503.", minimum=0)
    slo: str = _memory(
        "ttft:2s",
        "Latency targets, to the first token and per output token (ttft:2s,tpot:100ms). In a lasting overload requests "
        "that would miss ttft get 503 with Retry-After; tpot slows prompts so that running streams keep this pace.",
        check=_check_slo,
        metavar="LIMITS",
    )
    max_queue_seconds: float = _memory(
        10.0,
        "How long a burst may last and its requests wait; a longer overload is held to --slo, with 0 every one is.",
        minimum=0,
    )
    speculative_config: str = _memory(
        "auto",
        "Draft tokens that steps verify, in vLLM's JSON or a method alone: none, ngram and suffix (guesses out of "
        "known text, verified whenever there are some), mtp (these, and those of the checkpoint's MTP layer), auto (as "
        "many as are likely to pay); see drafts.md.",
        check=parse_speculative,
        metavar="JSON",
    )
    kv_events_config: str | None = _memory(
        None,
        "JSON object that has the cached KV blocks published for routers, with the fields that vLLM's has; see "
        "replicas.md.",
        check=parse_kv_events,
        metavar="JSON",
    )
    kv_transfer_config: str | None = _memory(
        None,
        "JSON object that lets services compute prompts for each other: key_file, kv_ip, kv_port, "
        "lease_seconds; see replicas.md.",
        check=parse_kv_transfer,
        metavar="JSON",
    )
    expert_memory: int | None = _expert_memory(
        None,
        "Most bytes of expert weights in the memory of each rank, or of its GPU; other experts are loaded when needed, "
        "from disk or from the GPU's host. All experts when left out.",
        parse=parse_size,
        minimum=1,
    )
    expert_store_dir: str | None = _expert_memory(
        None,
        "Folder for the file that experts are read from; by default in the model cache, or none for a GGUF file whose "
        "experts are read out of it. Without --expert-memory the file is mapped: the next start packs no experts.",
    )
    expert_policy: str = _expert_memory(
        "lfru",
        "Which expert is evicted: least recently used, least frequently used, both weighed, least loaded in the file "
        "of --expert-statistics, or least expected by the affinity that --expert-prefetch learns.",
        choices=("lru", "lfu", "lfru", "static", "affinity"),
    )
    expert_compute: str = _expert_memory(
        "auto",
        "Where a GPU's service computes experts that are not in the GPU's memory: copy (there, once they are copied), "
        "host (by the CPU, from host memory), or auto (whatever ends first by measured times).",
        choices=("auto", "copy", "host"),
    )
    expert_prefetch: str = _expert_memory(
        "auto",
        "What predicts the experts to load ahead: off, gate (later gates, applied early), fitted (later gates as "
        "`moeserve experts fit` predicts them), auto (fitted or else gate, off where that does not pay), or affinity "
        "(which experts followed the chosen ones so far, learnt while serving).",
        choices=("off", "auto", "gate", "fitted", "affinity"),
    )
    host: str = _http("127.0.0.1", "Address to listen on.")
    port: int = _http(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    api_key: tuple[str, ...] = _http((), "Key that clients must send.", secret=True)
    api_key_file: str | None = _http(
        None,
        "File of keys, one `role:key name=alice` per line; roles user, metrics, admin. Read again when it changes.",
    )
    trusted_proxy: tuple[str, ...] = _http(
        (),
        "Address or network of a proxy whose X-Forwarded-For names the client, for the log; * for any.",
        check=_check_proxy,
    )
    cors_allow_origin: tuple[str, ...] = _http((), "Origin whose pages may call the server from a browser; * for any.")
    allowed_host: tuple[str, ...] = _http(
        (), "Name by which clients may call a server without keys, beside addresses and local names; * for any."
    )
    tool_call_parser: str = _http(
        "auto",
        "Form in which the model writes tool calls; auto goes by the chat template and the model's type.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _http(
        "auto",
        "Form in which the model writes reasoning; auto goes by the chat template and the model's type.",
        choices=REASONING_PARSERS,
    )
    reasoning_budget: int = _http(
        -1,
        "Most tokens of an answer's thoughts where the request does not say; -1 is no bound, 0 ends each at once.",
        minimum=-1,
    )
    reasoning_budget_message: str | None = _http(
        None,
        "Text that is put before the end of the first thought whose budget is spent.",
        parse=_as_prose,
        metavar="TEXT",
    )
    reasoning_effort_budgets: str = _http(
        "{}",
        "JSON object of budgets of thought by effort, for requests that name the effort and no budget, such as "
        '{"low": 1024, "high": 16384}.',
        check=parse_effort_budgets,
        metavar="JSON",
    )
    num_frontends: int = _http(
        1,
        "HTTP processes on one port for one engine; auto is one for each 8 cores and 32 of --max-num-seqs, 1 to 8.",
        parse=_as_count,
        minimum=0,
        maximum=64,
    )
    max_connections: int = _http(
        1024,
        "Requests open at once in each HTTP process, of twice as many connections; more get 503, but not health, "
        "readiness and metrics.",
        minimum=1,
    )
    metrics_compat: str = _http(
        "vllm",
        "Other names under which /metrics tells its figures too: vLLM's names, for its dashboards, or none.",
        choices=("vllm", "none"),
    )
    max_logprobs: int = _http(20, "Most alternatives per token a client may ask for.", minimum=0, maximum=1000)
    response_store: str | None = _http(
        None,
        "File that keeps responses and conversations for all HTTP processes and over a restart; services of one model "
        "may share it. `memory` forgets them with the service, as does --port 0. By default one for each port in "
        "~/.local/state/moeserve.",
        metavar="FILE|memory",
    )
    response_store_size: int = _http(
        2**30,
        "Most bytes that responses and conversations take; the least recently used ones make room.",
        parse=parse_size,
        minimum=2**20,
    )
    response_store_days: float = _http(
        30.0, "Days after their last use for which responses and conversations are kept.", minimum=0.001
    )
    max_request_bytes: int = _http(4 * 2**20, "Largest request body.", parse=parse_size, minimum=1)
    shutdown_timeout: float = _operation(30.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0)
    sleep_after: float | None = _operation(
        None,
        "Time without a request after which weights and KV leave memory, until a request comes: 90s, 15m, 2h; never "
        "when left out. See sleep.md.",
        parse=parse_duration,
        metavar="DURATION",
        minimum=1,
    )
    engine_timeout: float = _operation(
        10.0, "Seconds without progress of the engine or of an HTTP process before it is taken for hung.", minimum=1
    )
    max_restarts: int = _operation(
        5,
        "How often in a row the model process or an HTTP process is started again after its end; 0 ends the service. "
        "One that has served for a minute begins a new count. Always 0 under a torchrun of your own.",
        minimum=0,
    )
    log_level: str = _operation("info", "Least severe log line printed.", choices=("debug", "info", "warning", "error"))
    log_format: str = _operation("auto", "Log lines for people or machines.", choices=("auto", "console", "json"))

    @property
    def weight_forms(self) -> WeightForms:
        return parse_quantization(self.quantization)

    @property
    def num_ranks(self) -> int:
        return self.expert_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def num_ranks_here(self) -> int:
        """The number of ranks of each node."""
        return self.num_ranks // self.nnodes


def load_config(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> ServeConfig:
    """Return the settings from all sources. `flags` maps field names to text (None or an empty tuple: not given).

    Raise ConfigError, whose sentence names the flag, variable or file key.
    """
    in_file = _read_toml(file) if file else {}
    environment = {name: value for name, value in environment.items() if not _is_service_link(name, value)}
    _refuse_unknown(environment)
    values: dict[str, Any] = {}
    for setting in fields(ServeConfig):
        flag, variable = flags.get(setting.name), environment.get(environment_name(setting))
        if flag is not None and flag != ():
            values[setting.name] = _value(setting, flag, flag_name(setting))
        elif variable is not None:
            given = variable.split(",") if setting.metadata.get("multiple") else variable
            values[setting.name] = _value(setting, given, environment_name(setting))
        elif setting.name in in_file:
            values[setting.name] = _value(setting, in_file[setting.name], f"{setting.name} in {file}")
    if values.get("device") == "cuda":
        values = {setting.name: default_of(setting, "cuda") for setting in fields(ServeConfig)} | values
    return ServeConfig(**values)


def default_of(setting: Field[Any], device: str) -> Any:
    """Return a setting's default where the model runs on `device`, `cpu` or `cuda`."""
    return setting.metadata.get("on_gpu", setting.default) if device == "cuda" else setting.default


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that looks like a setting and is none: a key that is misspelt would be none."""
    known = {setting.name.upper() for setting in fields(ServeConfig)} | _OTHER_VARIABLES
    for name in sorted(environment):
        key = name.removeprefix("MOESERVE_")
        if key != name and key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean MOESERVE_{close[0]}?" if close else "."
            raise ConfigError(f"{name} in the environment is no setting{hint}")


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable, as it does beside a service by the name of `moeserve`."""
    return _SERVICE_LINK.fullmatch(name) is not None or (name == "MOESERVE_PORT" and value.startswith("tcp://"))


def flag_name(setting: Field[Any]) -> str:
    """`kv_cache_memory` → `--kv-cache-memory`."""
    return "--" + setting.name.replace("_", "-")


def environment_name(setting: Field[Any]) -> str:
    """`kv_cache_memory` → `MOESERVE_KV_CACHE_MEMORY`."""
    return "MOESERVE_" + setting.name.upper()


def value_type(setting: Field[Any]) -> type:
    """Return the plain type of a setting's value, or of a tuple's elements: str, int, float or bool."""
    hint = get_type_hints(ServeConfig)[setting.name]
    if isinstance(hint, UnionType) or get_args(hint):
        hint = next(part for part in get_args(hint) if part not in (type(None), Ellipsis))
    return hint  # type: ignore[no-any-return]


def refuse_changed(config: ServeConfig, names: Sequence[str], needed: str) -> None:
    """Raise ConfigError if one of the settings is not at its default: no setting is accepted and ignored."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(ServeConfig, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} needs {needed}.")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    known = {setting.name for setting in fields(ServeConfig)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            hint = "; it is a table, and settings stand without one" if isinstance(value, dict) else hint
            raise ConfigError(f"{file} has an unknown setting {key!r}{hint}")
        if name in values:
            raise ConfigError(f"{file} gives {name} twice")
        values[name] = value
    return values


def _value(setting: Field[Any], given: Any, source: str) -> Any:
    """Return `given`, text or a TOML value, as the setting's type. Raise ConfigError if it is out of limits."""
    if setting.metadata.get("multiple"):
        items = [given] if isinstance(given, str) else given
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{source} must be a list of strings")
        return tuple(_scalar(setting, item, source) for item in items)
    return _scalar(setting, given, source)


def _scalar(setting: Field[Any], given: Any, source: str) -> Any:
    metadata = setting.metadata
    try:
        value = metadata.get("parse", _CONVERT[value_type(setting)])(given)
        metadata.get("check", str)(value)
    except _NotThat:
        shown = "the given value" if metadata.get("secret") else repr(given)
        raise ConfigError(f"{source}: {shown} is not {_NOUNS[value_type(setting)]}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if "choices" in metadata and value not in metadata["choices"]:
        raise ConfigError(f"{source}: {value!r} is not one of {', '.join(metadata['choices'])}")
    if "minimum" in metadata and value < metadata["minimum"]:
        raise ConfigError(f"{source}: {value} is less than {metadata['minimum']}")
    if "maximum" in metadata and value > metadata["maximum"]:
        raise ConfigError(f"{source}: {value} is more than {metadata['maximum']}")
    return value


_CONVERT: dict[type, Callable[[Any], Any]] = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_text}
_NOUNS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text that is not empty"}


def state_root() -> Path:
    """Return the folder for files that cannot be rebuilt: $XDG_STATE_HOME/moeserve, ~/.local/state/moeserve.

    Raise ConfigError if the account has no home.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The XDG specification says to ignore relative paths.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "moeserve"
    except RuntimeError:
        raise ConfigError("This account has no home for the response store: set --response-store.") from None


def cache_root() -> Path:
    """Return the folder for files that can be rebuilt: $MOESERVE_CACHE, $XDG_CACHE_HOME/moeserve, ~/.cache/moeserve.

    Raise ConfigError if the account has no home.
    """
    own = os.environ.get("MOESERVE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        # The XDG specification says to ignore relative paths.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moeserve"
    except RuntimeError:
        raise ConfigError("This account has no home for the cache: set HOME, or MOESERVE_CACHE to a folder.") from None
