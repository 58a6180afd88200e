"""The report of `moeserve doctor` on a folder or a hub repository with several GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from launcher.console import format_bytes

if TYPE_CHECKING:
    from moeserve.engine.gguf_choice import FileChoice


def file_lines(choices: Sequence[FileChoice]) -> Iterator[str]:
    """Return the lines of a report: each model, then the one to take."""
    from moeserve.engine.gguf_choice import advised

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
    from moeserve.engine.gguf_choice import advised

    taken = [choice.name for choice in advised(choices).values()]
    return {"files": [asdict(choice) for choice in choices], "take": taken}
