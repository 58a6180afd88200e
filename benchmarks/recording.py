"""`python -m benchmarks.recording FOLDER`: what gathering routing costs a step.

CPU time, not wall time: both parts run in one thread of one process, step by step, so that other load on the machine
changes their ratio little.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import click


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(1, 16), show_default=True)
@click.option("--steps", type=click.IntRange(min=16), default=96, show_default=True, help="Per number of streams.")
def command(model: Path, streams: tuple[int, ...], steps: int) -> None:
    """Measure what --record-experts costs a decode step of the MODEL in a folder, on one thread."""
    from benchmarks.recording_runs import Measured, RecordedModel

    recorded = RecordedModel(model)
    for count in streams:
        measured: Measured = recorded.measure(prompts(count), steps, time.process_time)
        click.echo(
            f"{count} streams: step {1e3 * measured.step:.2f} ms, recording {1e6 * measured.recording:.0f} us CPU, "
            f"{100 * measured.recording / measured.step:.2f} %"
        )


def prompts(count: int) -> list[array[int]]:
    """Different prompts of 20 tokens."""
    return [array("i", (1 + (7 * stream + 13 * place) % 100 for place in range(20))) for stream in range(count)]


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.recording")
