"""`moeserve doctor`: describe a model and this machine, and say which ways of serving it fit."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.auto_model import TOKENS_OF_AGENTS
from launcher.gpu_choice import GpuHangs, remember, run_probe
from launcher.gpu_probe import Found, Line
from launcher.gpus import gpu_names
from launcher.kv_disk import without_none
from launcher.preflight import usable_cores
from launcher.server_client import named_server_option
from launcher.settings_options import some_settings
from launcher.socket_ranks import rank_per_node
from moeserve.config import ConfigError, ServeConfig, cache_root, environment_name, load_config
from moeserve.device import RESERVE_BYTES, cuda_absence
from moeserve.engine.gpu_check.checked import Checked
from moeserve.engine.kv.disk.files import disk_root
from moeserve.model.spec import ModelError
from moeserve.settings.quantities import parse_size, show_size

if TYPE_CHECKING:
    from moeserve.engine.doctor import Setup
    from moeserve.engine.gguf_choice import FileChoice
    from moeserve.engine.known_model import KnownModel
    from moeserve.engine.model_ways import ModelWays
    from moeserve.machine import Machine

_SETTINGS = (
    "revision",
    "offline",
    "device",
    "pipeline_parallel_size",
    "layers_per_rank",
    "expert_parallel_size",
    "tensor_parallel_size",
    "dtype",
    "quantization",
    "arithmetic",
    "max_model_len",
    "block_size",
    "kv_cache_memory",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_seqs",
    "state_cache_memory",
    "enable_prefix_caching",
    "kv_host_memory",
    "kv_disk_path",
    "kv_disk_size",
    "kv_disk_age",
    "kv_overflow",
    "expert_memory",
    "expert_store_dir",
)
# Bytes for keys and values beside the largest model that is named where none was asked about.
_KV_ROOM_BYTES = 2 * 2**30
_ALWAYS_UNKNOWN = (
    "What a prompt's tokens cost: they are bound by products, which were not measured.",
    "How fast other programs let this machine be.",
)
_OF_A_GPU = "What the largest step takes on a GPU, known once the model is loaded: KV gets that much less."
_UNPLANNED_ON_A_GPU = (
    "What fits into a GPU: recurrent states, and models on transformers' code, are not planned there before loading; "
    "--device cuda tries it."
)
_OF_EXPERT_MEMORY = "How often tokens choose experts that are not in memory, and so how fast --expert-memory is."


@click.command(name="doctor")
@click.argument("model", required=False)
@named_server_option
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="Key of that service, of role metrics or admin.")
@click.option("--gpus", metavar="NxNAME", help="Plan for GPUs that are elsewhere, as 8xH100-80G or 4x24GB.")
@click.option("--memory", metavar="SIZE", help="Plan for a machine that has this free memory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
@click.option(
    "--gpu", "checks_gpu", is_flag=True, help="Check that the GPU computes what a CPU does, and nothing else."
)
@some_settings(*_SETTINGS)
def doctor(
    model: str | None,
    url: str | None,
    api_key: str | None,
    gpus: str | None,
    memory: str | None,
    as_json: bool,
    checks_gpu: bool,
    **flags: Any,
) -> None:
    """Describe MODEL and say which ways of serving it fit into this machine. Without MODEL, describe this machine.

    MODEL is a folder or a hub id; config.json is enough, weights are not needed and never downloaded. The options are
    the options of serve on which memory depends, also read from the environment. Exit code 1 if MODEL cannot be served.
    With --url look at a service that runs, and say what to change.
    """
    if url is not None:
        if model is not None:
            raise click.UsageError("--url looks at a service that runs: give no MODEL beside it.")
        _look_at(url, None if api_key is None else api_key.split(",")[0], as_json=as_json)
        return
    if checks_gpu:
        if model is not None:
            raise click.UsageError("--gpu checks the GPU alone: leave MODEL out.")
        sys.exit(_check_gpu(run_probe(["--check"])))
    try:
        settings = {environment_name(setting) for setting in fields(ServeConfig) if setting.name in _SETTINGS}
        environment = {name: value for name, value in os.environ.items() if name in settings}
        config, on_gpu = load_config(flags, environment), load_config(flags | {"device": "cuda"}, environment)
        if model is not None:
            model = load_config({"model": model}, {}).model
        config, on_gpu = (without_none(replace(one, model=model)) for one in (config, on_gpu))
        read = _reader(config, gpus, memory)
        report = _report_of_files(model, config, read) or _report(model, config, on_gpu, read)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except ModelError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    click.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))


def _check_gpu(lines: Iterator[Line]) -> int:
    """Print the findings of a probe as a table, and remember them for `--device auto`. Return the exit code."""
    told: list[Checked] = []
    try:
        for line in lines:
            if isinstance(line, Found) and line.absence:
                click.echo(f"Error: {line.absence}.", err=True)
                return 1
            if isinstance(line, Checked):
                told.append(line)
                click.echo(f"  {line.name:<30} {line.seconds:6.1f} s  {line.fault or 'passed'}")
    except GpuHangs as error:
        click.echo(f"Error: {error}.", err=True)
        return 1
    faults = [f"{check.name}: {check.fault}" for check in told if check.fault]
    remember(gpu_names(), faults)
    click.echo(f"{len(told) - len(faults)} of {len(told)} checks passed.")
    return int(bool(faults))


def _look_at(url: str, api_key: str | None, *, as_json: bool) -> None:
    """Print advice on a running service, by its figures."""
    from launcher.service_doctor import advice, read_figures

    sentences = advice(read_figures(url, api_key))
    if as_json:
        click.echo(json.dumps({"advice": sentences}, indent=2))
        return
    for sentence in sentences:
        click.echo(f"- {sentence}")
    if not sentences:
        click.echo("Its figures since the start ask for no change.")


def _reader(config: ServeConfig, gpus: str | None, memory: str | None) -> Callable[[], Machine]:
    """Return a function that describes this machine, or the one of the options. Raise ConfigError."""
    if gpus is None and memory is None:
        return _read_machine
    from launcher.gpu_table import parse_gpus

    changes: dict[str, Any] = {}
    if gpus is not None:
        changes["gpus"] = found = parse_gpus(gpus)
        if config.num_ranks > len(found):
            raise ConfigError(f"{config.num_ranks} ranks need as many --gpus.")
    try:
        if memory is not None:
            changes["free_bytes"] = changes["memory_bytes"] = parse_size(memory)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from None
    return lambda: replace(_read_machine(), **changes)


def _read_machine() -> Machine:
    from moeserve.machine import read_machine

    return read_machine(usable_cores())


def _report_of_files(model: str | None, config: ServeConfig, read: Callable[[], Machine]) -> _FilesReport | None:
    """Return a report on several GGUF models; None where MODEL is none of these, or one alone."""
    if model is None:
        return None
    from moeserve.engine.gguf_choice import file_choices

    found = file_choices(model, config, read)
    return None if found is None else _FilesReport(*found)


def _report(model: str | None, config: ServeConfig, on_gpu: ServeConfig, read: Callable[[], Machine]) -> _Report:
    if model is None:
        return _Report(None, read(), [])
    # The model first: its faults are reported at once.
    from moeserve.engine.doctor import least_memory, rounded_setups, setups_of
    from moeserve.engine.known_model import NativeModel, examine
    from moeserve.model.source import resolve_config

    folder = resolve_config(model, revision=config.revision, offline=config.offline)
    known, machine = examine(folder), read()
    config, on_gpu = (replace(each, revision=None, offline=False) for each in (config, on_gpu))
    setups: list[Setup] = []
    if config.device == "auto" and (on_nodes := rank_per_node(config, folder, machine.num_nodes)) is not config:
        # What a start takes.
        setups = [one for one in setups_of(known, machine, on_nodes)[:1] if one.obstacle is None]
    setups += [one for one in setups_of(known, machine, config, on_gpu) if config.device in ("auto", one.device)]
    fits = any(setup.obstacle is None for setup in setups)
    ways = None
    if isinstance(known, NativeModel):
        from moeserve.engine.model_ways import ways_here

        ways = ways_here(known, machine, config)
    if config.device == "cuda":
        return _Report(known, machine, setups, ways=ways)
    least = None if fits else least_memory(known, machine, config)
    return _Report(known, machine, setups, least, rounded_setups(known, machine, config), ways)


class _FilesReport:
    """A report on a folder or a hub repository with several GGUF models, as text or as JSON."""

    def __init__(self, choices: list[FileChoice], machine: Machine) -> None:
        from moeserve.engine.gguf_choice import advised

        self._choices, self._machine, self._taken = choices, machine, advised(choices)

    def as_json(self) -> dict[str, Any]:
        """Return the facts of the text, sizes in bytes."""
        taken = [choice.name for choice in self._taken.values()]
        return {"machine": asdict(self._machine), "files": [asdict(one) for one in self._choices], "take": taken}

    def lines(self) -> Iterator[str]:
        yield from _machine_lines(self._machine)
        width = max(len(choice.name) for choice in self._choices)
        yield ""
        yield f"GGUF models: {len(self._choices)}"
        for choice in self._choices:
            yield f"  {choice.name:<{width}}  {show_size(choice.num_bytes):>9}  {_said(choice)}"
        yield ""
        for name, choice in self._taken.items():
            of_model = f" of {name}" if len(self._taken) > 1 else ""
            yield f"  Take the most bits{of_model} that fit: moeserve serve {choice.name}"
        if not self._taken:
            yield "  None of up to 8 bits a weight fits into memory here."
            yield f"  Whether one fits with experts on disk: moeserve doctor {self._choices[0].name}"


def _said(choice: FileChoice) -> str:
    on_gpu = ""
    if choice.gpu_tokens is not None:
        on_gpu = f"; on the GPU it fits, {choice.gpu_tokens:,} tokens of keys and values beside it"
    if choice.obstacle is not None:
        return f"does not fit: {choice.obstacle}{on_gpu}"
    speed = choice.tokens_per_second
    parts = ["fits"]
    if speed is not None:
        parts.append(f"at most {speed:,.1f} tokens/s for one request")
    if choice.kv_tokens is not None:
        parts.append(f"{choice.kv_tokens:,} tokens of keys and values beside it")
    return ", ".join(parts) + on_gpu


class _Report:
    """A report on model, machine and setups, as text or as JSON.

    model: None for the machine alone. least: the bytes of free memory that would do, and the setup that fits then,
    where nothing fits here. rounded: the ways that fit with weights of fewer bits. ways: of several ranks.
    """

    def __init__(
        self,
        model: KnownModel | None,
        machine: Machine,
        setups: list[Setup],
        least: tuple[int, Setup] | None = None,
        rounded: list[Setup] | None = None,
        ways: ModelWays | None = None,
    ) -> None:
        self._model, self._machine, self._setups, self._least = model, machine, setups, least
        self._rounded, self._ways = rounded or [], ways

    def as_json(self) -> dict[str, Any]:
        """Return the facts of the text, sizes in bytes."""
        machine = asdict(self._machine)
        if self._model is None:
            return {"machine": machine, "unknown": self._unknown()}
        from moeserve.engine.known_model import implementation_of, kinds_of_layers, parameters_of, sizes_of

        model = self._model
        return {
            "model": {
                "type": model.spec.model_type,
                "implementation": implementation_of(model.spec),
                "layers": [{"number": number, "with": kind} for number, kind in kinds_of_layers(model.spec)],
                "parameters": asdict(parameters_of(model.spec)),
                "max_model_len": model.spec.max_position,
                "checkpoint": dict(model.stored),
                "sizes": [asdict(sizes) for sizes in sizes_of(model)],
            },
            "machine": machine,
            "setups": [asdict(setup) for setup in self._setups],
            "rounded": [asdict(setup) for setup in self._rounded],
            "ways": None if self._ways is None else asdict(self._ways),
            "least": None if self._least is None else {"free_bytes": self._least[0], "setup": asdict(self._least[1])},
            "unknown": self._unknown(),
        }

    def lines(self) -> Iterator[str]:
        if self._model is not None:
            yield from _model_lines(self._model)
            yield ""
        yield from _machine_lines(self._machine)
        if self._model is None:
            yield from _file_hints(self._machine)
        longest = 0 if self._model is None else self._model.spec.max_position
        for setup in self._setups:
            yield from _setup_lines(setup, longest)
        if self._rounded:
            yield ""
            yield "With weights of fewer bits, which costs some quality:"
            for setup in self._rounded:
                yield from _setup_lines(setup, longest)
        if self._least is not None:
            num_bytes, setup = self._least
            yield ""
            name = " ".join(("moeserve serve MODEL", *setup.flags))
            yield f"  A machine with {show_size(num_bytes)} of free memory serves it: {name}"
        if self._ways is not None:
            yield ""
            yield from _ways_lines(self._ways)
        yield ""
        yield "Not known:"
        yield from (f"  {sentence}" for sentence in self._unknown())

    def _unknown(self) -> list[str]:
        sentences = [] if self._model is None else list(self._model.assumptions)
        if self._machine.bandwidth is None:
            sentences.append("How fast memory is: too little is free to measure it.")
        if gpu_names() and not self._machine.gpus:
            sentences.append(f"What fits into the GPU: {cuda_absence(False) or 'torch finds none that it can use'}.")
        if self._machine.gpus and self._setups and all(setup.device == "cpu" for setup in self._setups):
            sentences.append(_UNPLANNED_ON_A_GPU)
        if any(setup.device == "cuda" for setup in self._setups):
            sentences.append(_OF_A_GPU)
        if any("--expert-memory" in setup.flags for setup in self._setups):
            sentences.append(_OF_EXPERT_MEMORY)
        return sentences + list(_ALWAYS_UNKNOWN)


def _model_lines(model: KnownModel) -> Iterator[str]:
    from moeserve.engine.known_model import implementation_of, kinds_of_layers, parameters_of, said_parameters, sizes_of

    spec = model.spec
    yield f"{spec.model_type} ({implementation_of(spec)}), {said_parameters(parameters_of(spec))}"
    for place, (number, kind) in enumerate(kinds_of_layers(spec)):
        yield f"  {'layers' if place == 0 else '':<11} {number} with {kind}"
    yield f"  context     {spec.max_position:,} tokens"
    stored = ", ".join(f"{show_size(num_bytes)} of {dtype}{_rounded(dtype)}" for dtype, num_bytes in model.stored)
    yield f"  checkpoint  {stored}"
    yield ""
    yield _row("numbers of", "weights", "KV of a token", f"KV of {spec.max_position:,} tokens", "state of a request")
    found = sizes_of(model)
    for sizes in found:
        weights, kv_bytes, state = show_size(sizes.weights_bytes), sizes.kv_bytes, sizes.state_bytes
        if kv_bytes is None or state is None:
            yield _row(sizes.name, weights, *("not known",) * 3)
            continue
        of_context = show_size(sizes.context_bytes(spec.max_position))
        yield _row(sizes.name, weights, show_size(kv_bytes), of_context, show_size(state) if state else "none")
    if found[0].window_kv_bytes:
        widths = ", ".join(f"{show_size(sizes.window_kv_bytes)} in {sizes.name}" for sizes in found)
        yield f"  and of each of the last {found[0].window:,} tokens, in layers with a window: {widths}"


def _rounded(dtype: str) -> str:
    """Say to what a kind of a file is rounded while it is loaded; nothing if it is kept."""
    from moeserve.model.rounding import format_in_file

    form = format_in_file(dtype)
    return "" if form is None or form.name == dtype.lower() else f" (rounded to {form.name})"


def _row(name: str, weights: str, of_token: str, of_context: str, state: str) -> str:
    return f"  {name:<11} {weights:>11} {of_token:>15} {of_context:>22} {state:>20}"


def _machine_lines(machine: Machine) -> Iterator[str]:
    sets = f" ({', '.join(machine.instruction_sets)})" if machine.instruction_sets else ""
    yield f"This machine: {machine.cores} core{'' if machine.cores == 1 else 's'} of {machine.processor}{sets}"
    speed = "" if machine.bandwidth is None else f", copied at {machine.bandwidth / 1e9:.1f} GB/s"
    yield f"  memory      {show_size(machine.free_bytes)} free of {show_size(machine.memory_bytes)}{speed}"
    if machine.num_nodes > 1:
        yield f"  NUMA nodes  {machine.num_nodes}: a start puts a rank on each, where ranks can share the layers"
    for gpu in machine.gpus:
        speed = "" if gpu.bandwidth is None else f", copied at {gpu.bandwidth / 1e9:.0f} GB/s"
        obstacle = "" if gpu.obstacle is None else f"; cannot be used: {gpu.obstacle}"
        yield (
            f"  GPU         {gpu.name}, {show_size(gpu.free_bytes)} free of {show_size(gpu.total_bytes)}"
            f"{speed}{obstacle}"
        )
    if not machine.gpus:
        yield "  GPU         none"


def _file_hints(machine: Machine) -> Iterator[str]:
    """Say which models to look for, to somebody who has named none."""
    room = machine.free_bytes - RESERVE_BYTES - _KV_ROOM_BYTES
    if room > 0:
        room_for_kv = f"{show_size(_KV_ROOM_BYTES)} of keys and values"
        yield ""
        yield f"  Models of up to {show_size(room)} fit whole beside {room_for_kv}. Of a repository of GGUF files"
        yield "  moeserve doctor owner/name says which to take, and moeserve serve owner/name:Q4_K_M serves one."


def _setup_lines(setup: Setup, longest: int) -> Iterator[str]:
    """longest: the model's context, in tokens."""
    name = " ".join(("moeserve serve MODEL", *setup.flags))
    yield ""
    if setup.obstacle is not None:
        yield f"  {name}: does not fit"
        yield f"    {setup.obstacle}"
        return
    yield f"  {name}: fits"
    few = "" if setup.resident_experts is None else f", {setup.resident_experts} experts of each layer at a time"
    yield f"    weights   {show_size(setup.weights_bytes)}{few}"
    tokens = f"{setup.kv_tokens:,} tokens, at most {setup.max_model_len:,} per request"
    yield f"    KV        {show_size(setup.kv_bytes)} = {tokens}"
    if setup.max_model_len < min(TOKENS_OF_AGENTS, longest):
        halved = "" if "--kv-cache-dtype" in setup.flags else "; --kv-cache-dtype int8 makes room for more"
        yield f"    agents    a terminal agent needs {TOKENS_OF_AGENTS:,} tokens per request{halved}"
    if setup.num_window_blocks:
        yield f"    windows   {setup.num_window_blocks:,} of its blocks hold the last tokens, for layers with a window"
    if setup.state_bytes:
        counts = f"{setup.num_state_slots:,} requests at once, {setup.num_snapshots:,} snapshots"
        yield f"    states    {show_size(setup.state_bytes)} = {counts}"
    if setup.kv_host_bytes:
        yield f"    host      {show_size(setup.kv_host_bytes)} of its memory for KV that leaves the GPU"
    if setup.expert_file_bytes:
        root = _root_of(setup, "--expert-store-dir", cache_root() / "experts")
        taken = f"{show_size(setup.expert_file_bytes)} for the expert file, written while the first start serves"
        yield f"    disk      {taken}; {root} has {show_size(_free_below(root))} free"
    if setup.kv_disk_bytes:
        yield f"    disk      {_said_of_kv_disk(setup)}"
    if setup.tokens_per_second is not None:
        yield f"    speed     at most {setup.tokens_per_second:,.1f} tokens/s for one request, as memory is read"


def _ways_lines(ways: ModelWays) -> Iterator[str]:
    from moeserve.engine.model_ways import MANY
    from moeserve.engine.ways import advised

    yield f"On {ways.num_ranks} ranks, each on a {ways.what}, over {ways.link.name}, as a cost model has it:"
    yield f"  {'':<54} {'weights of a rank':>17} {'tokens/s of 1 request':>22} {f'of {MANY}':>8}"
    for one in ways.estimates:
        speeds = f"{one.one:>22,.0f} {one.many:>8,.0f}" if one.fits else f"{'does not fit':>22}"
        yield f"  {' '.join(one.way.flags):<54} {show_size(one.rank_bytes):>17} {speeds}"
    if (taken := advised(ways.estimates)) is None:
        return
    for who, one in zip(("one request", "many"), taken, strict=True):
        yield f"  For {who} take {' '.join(one.way.flags)}"
    if ways.what != "NUMA node":
        yield "  No service of several GPUs has run yet."


def _said_of_kv_disk(setup: Setup) -> str:
    """Say how much KV there may be on disk, and whether the disk has room for it."""
    from moeserve.engine.kv.disk.files import is_root, scan

    root, size = _root_of(setup, "--kv-disk-path", cache_root()), setup.kv_disk_bytes
    used = sum(block.num_bytes for block in scan(root, time.time())) if is_root(root) else 0
    free = _free_below(root)
    # A state or a window is written for some prefixes alone, so tokens are not known beside them.
    knows_tokens = not (setup.state_bytes or setup.num_window_blocks)
    tokens = f" = about {size * setup.kv_tokens // setup.kv_bytes:,} tokens" if knows_tokens and setup.kv_bytes else ""
    there = f" beside {show_size(used)} of KV that is there" if used else ""
    lacks = "" if used + free >= size else ", too little: what finds no room is not kept"
    return f"at most {show_size(size)} of KV{tokens}; {root} has {show_size(free)} free{there}{lacks}"


def _root_of(setup: Setup, flag: str, default: Path) -> Path:
    """Return the folder that a flag of a setup names."""
    named = dict(pairwise(setup.flags)).get(flag)
    return default if named is None else disk_root(named)


def _free_below(root: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    return shutil.disk_usage(next(folder for folder in (root, *root.parents) if folder.exists())).free
