"""What `moeserve doctor` says of a folder or a hub repository with several GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from launcher.console import format_bytes
from moeserve.config import ServeConfig
from moeserve.engine.gguf_choice import FileChoice, advised, choices_here, choices_of_hub, spec_of_first
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.model.source import hub_gguf_sizes, local_gguf_models

if TYPE_CHECKING:
    from moeserve.machine import Machine


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
    spec = spec_of_first(repositories, config.revision)
    dtype = {"bfloat16": torch.bfloat16, "int8": torch.int8}.get(config.kv_cache_dtype, torch.float32)
    kv_bytes = 0 if spec is None else kv_block_bytes(spec.kv_layers, 1, dtype)
    return choices_of_hub(model, sizes, spec, machine, kv_bytes), machine


def file_lines(choices: Sequence[FileChoice]) -> Iterator[str]:
    """Return the lines of a report: each model, then the one to take."""
    width = max(len(choice.name) for choice in choices)
    yield f"GGUF models: {len(choices)}"
    for choice in choices:
        yield f"  {choice.name:<{width}}  {format_bytes(choice.num_bytes):>9}  {_said(choice)}"
    yield ""
    taken = advised(choices)
    for name, choice in taken.items():
        of_model = f" of {name}" if len(taken) > 1 else ""
        yield f"  Take the most bits{of_model} that fit: moeserve serve {choice.name}"
    if not taken:
        yield "  None of up to 8 bits a weight fits into memory here."
        yield f"  Whether one fits with experts on disk: moeserve doctor {choices[0].name}"


def _said(choice: FileChoice) -> str:
    if choice.obstacle is not None:
        return f"does not fit: {choice.obstacle}"
    speed = choice.tokens_per_second
    parts = ["fits"]
    if speed is not None:
        parts.append(f"at most {speed:,.1f} tokens/s for one request")
    if choice.kv_tokens is not None:
        parts.append(f"{choice.kv_tokens:,} tokens of keys and values beside it")
    return ", ".join(parts)


def file_json(choices: Sequence[FileChoice]) -> dict[str, Any]:
    """Return the same in numbers, sizes in bytes."""
    taken = [choice.name for choice in advised(choices).values()]
    return {"files": [asdict(choice) for choice in choices], "take": taken}
