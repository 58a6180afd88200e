"""Which of several GGUF files of a model to serve on a machine: the most bits that fit, up to eight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeserve.config import ConfigError, ServeConfig
from moeserve.device import RESERVE_BYTES
from moeserve.engine.doctor import for_gpu, kv_on_gpu, setups_of
from moeserve.engine.known_model import examine, in_billions, parameters_of, widened_parameters_of
from moeserve.engine.memory_plan import share_memory
from moeserve.machine import Machine
from moeserve.model.gguf.hub import kind_of
from moeserve.model.source import hub_gguf_sizes, local_gguf_models, resolve_config
from moeserve.model.spec import DecoderSpec, ModelError, ModelSpec

# A file leaves memory for the keys and values of this number of tokens, or of the model's context if it is shorter.
_LEAST_TOKENS = 8192
# Bytes that are kept for keys and values of a model whose configuration is not known.
_UNKNOWN_KV_BYTES = 2**30
_NO_ROOM = "It does not fit beside keys and values."
_FLOAT_BYTES = 4  # of a weight that is widened to float32
# Kinds that have 16 bits and more: slower than eight bits, and hardly better.
_WIDE = frozenset(("BF16", "F16", "F32"))


@dataclass(frozen=True, slots=True)
class FileChoice:
    """One GGUF file, or the parts of one, among several. name: for `moeserve serve`. kind: None if its name tells none.
    model: which of several models it holds, for people.

    obstacle: why this machine does not serve it from memory. kv_tokens: that fit beside it, None if not known.
    tokens_per_second: the most for one request, as memory is read; None if not known. gpu_tokens: of keys and values
    beside it in the memory of the smallest GPU; None without a GPU that it fits, and if not known.
    """

    name: str
    kind: str | None
    num_bytes: int
    model: str = ""
    obstacle: str | None = None
    kv_tokens: int | None = None
    tokens_per_second: float | None = None
    gpu_tokens: int | None = None


def advised(choices: Sequence[FileChoice]) -> dict[str, FileChoice]:
    """Return by model the largest file that fits and has at most eight bits a weight, if one does.

    Where one of them fits a GPU, the largest that does.
    """
    found: dict[str, FileChoice] = {}
    for choice in sorted(choices, key=lambda choice: (choice.gpu_tokens is not None, choice.num_bytes)):
        if (choice.obstacle is None or choice.gpu_tokens is not None) and choice.kind not in _WIDE:
            found[choice.model] = choice
    return found


def file_choices(
    model: str, config: ServeConfig, read_machine: Callable[[], Machine]
) -> tuple[list[FileChoice], Machine] | None:
    """Return the GGUF models of a folder or a hub repository that holds nothing else; None of any other MODEL.

    Raise ModelError.
    """
    models = local_gguf_models(model)
    if models:
        machine = read_machine()
        return choices_here(models, machine, config), machine
    sizes, repositories = hub_gguf_sizes(model, revision=config.revision, offline=config.offline)
    if not sizes:
        return None
    machine = read_machine()
    spec = spec_of_first(repositories, config.revision, offline=config.offline)
    return choices_of_hub(model, sizes, spec, machine, config), machine


def choices_here(models: Sequence[Sequence[Path]], machine: Machine, config: ServeConfig) -> list[FileChoice]:
    """Describe GGUF models on this machine, each by its first part, the smallest first."""
    choices = [_choice_here(parts, machine, replace(config, device="cpu")) for parts in models]
    return sorted(choices, key=lambda choice: choice.num_bytes)


def _choice_here(parts: Sequence[Path], machine: Machine, config: ServeConfig) -> FileChoice:
    num_bytes = sum(part.stat().st_size for part in parts)
    choice = FileChoice(str(parts[0]), kind_of(parts[0].name), num_bytes)
    try:
        model = examine(resolve_config(str(parts[0])))
    except ModelError as error:
        return replace(choice, obstacle=str(error))
    name = f"{model.spec.model_type}, {in_billions(parameters_of(model.spec).total)} parameters"
    setup, *others = setups_of(model, machine, config)
    obstacle, least = setup.obstacle, min(_LEAST_TOKENS, model.spec.max_position)
    if obstacle is None and setup.kv_tokens < least:
        obstacle = f"Only {setup.kv_tokens:,} tokens of keys and values fit beside it."
    speed, on_gpu = setup.tokens_per_second, next((other for other in others if other.device == "cuda"), None)
    fits = on_gpu is not None and on_gpu.obstacle is None and on_gpu.kv_tokens >= least
    return replace(
        choice,
        model=name,
        obstacle=obstacle,
        kv_tokens=setup.kv_tokens,
        tokens_per_second=speed,
        gpu_tokens=on_gpu.kv_tokens if on_gpu is not None and fits else None,
    )


def choices_of_hub(
    name: str, sizes: Mapping[str, int], spec: ModelSpec | None, machine: Machine, config: ServeConfig
) -> list[FileChoice]:
    """Describe the kinds of GGUF models of a hub repository, the smallest first.

    sizes: bytes by kind. spec: of the model, None if its configuration is not known.
    """
    choices = []
    for kind, num_bytes in sorted(sizes.items(), key=lambda item: item[1]):
        loaded, read = (num_bytes, None) if spec is None else _bytes_in_memory(num_bytes, spec)
        obstacle, kv_tokens = _kv_beside(loaded, spec, machine, config)
        speed = None
        if obstacle is None and read is not None and machine.bandwidth is not None:
            speed = machine.bandwidth / read
        on_gpu = _kv_on_gpu(num_bytes, spec, machine, config)
        choices.append(FileChoice(f"{name}:{kind}", kind, num_bytes, name, obstacle, kv_tokens, speed, on_gpu))
    return choices


def _bytes_in_memory(num_bytes: int, spec: ModelSpec) -> tuple[int, float | None]:
    """Return the bytes that the weights of a file of `num_bytes` take, and those that one token reads, None if that is
    not known. The parameters of a file have the same width; one row of the embedding is read."""
    count, (widened, read_widened) = parameters_of(spec), widened_parameters_of(spec)
    width = num_bytes / count.total
    loaded = round(num_bytes + widened * (_FLOAT_BYTES - width))
    if count.active is None:
        return loaded, None
    packed = count.active - spec.vocab_size * spec.hidden_size - read_widened
    return loaded, packed * width + read_widened * _FLOAT_BYTES


def _kv_on_gpu(num_bytes: int, spec: ModelSpec | None, machine: Machine, config: ServeConfig) -> int | None:
    """Return the tokens of KV beside weights of `num_bytes` on the GPU that is taken, None where they do not fit it."""
    gpu = next((gpu for gpu in machine.gpus if gpu.obstacle is None), None)
    if gpu is None or not isinstance(spec, DecoderSpec) or spec.state_layers:
        return None
    try:
        kv = kv_on_gpu(spec, gpu, num_bytes, (on_gpu := for_gpu(config)))
    except ConfigError:
        return None
    tokens = 0 if kv is None else kv.num_blocks * on_gpu.block_size
    return tokens if tokens >= min(_LEAST_TOKENS, spec.max_position) else None


def _kv_beside(
    num_bytes: int, spec: ModelSpec | None, machine: Machine, config: ServeConfig
) -> tuple[str | None, int | None]:
    """Return why weights of `num_bytes` do not fit, None if they do, and the tokens of KV that a start would plan.

    The tokens are None where the model's configuration is not known.
    """
    if spec is None:
        fits = num_bytes + RESERVE_BYTES + _UNKNOWN_KV_BYTES <= machine.free_bytes
        return None if fits else _NO_ROOM, None
    if config.kv_cache_dtype == "auto" and isinstance(spec, DecoderSpec):
        # Our own code rounds the rows that multiply blocks of a GGUF file, and then keeps keys and values in 16 bits.
        config = replace(config, kv_cache_dtype="float32" if config.arithmetic == "exact" else "bfloat16")
    try:
        kv = share_memory(spec, torch.float32, num_bytes, config, machine.free_bytes).kv
    except (ModelError, ConfigError):
        return _NO_ROOM, 0
    tokens = kv.num_blocks * config.block_size
    return _NO_ROOM if tokens < min(_LEAST_TOKENS, spec.max_position) else None, tokens


def spec_of_first(repositories: Sequence[str], revision: str | None, *, offline: bool) -> ModelSpec | None:
    """Return the spec of the first repository whose config.json can be had and whose type is served."""
    for place, repository in enumerate(repositories):
        try:
            folder = resolve_config(repository, revision=None if place else revision, offline=offline)
            return examine(folder).spec
        except ModelError:
            continue
    return None
