"""The process that builds the demo checkpoint, so that torch and a gigabyte of memory leave with it.

It writes one JSON event per line to its standard output and exits 0, or 1 after an event with `error`.
"""

import sys
from pathlib import Path

import msgspec

from moeserve.models.errors import ModelError


class Job(msgspec.Struct, frozen=True):
    """What to build, and where: the only command-line argument, as JSON."""

    out_dir: str
    experts: int
    top_k: int
    split: bool = False


class Event(msgspec.Struct, frozen=True):
    """Progress, as in `moeserve.models.progress`, or the sentence that ends an unsuccessful build."""

    stage: str = ""
    done: int = 0
    total: int = 0
    error: str | None = None


def main(argument: str) -> int:
    from safetensors import SafetensorError

    from moeserve.models.demo.build import build_demo
    from moeserve.models.demo.split_build import build_split

    job = msgspec.json.decode(argument, type=Job)
    build = build_split if job.split else build_demo
    try:
        build(
            Path(job.out_dir),
            experts=job.experts,
            top_k=job.top_k,
            progress=lambda stage, done, total: _send(Event(stage, done, total)),
        )
    except ModelError as error:
        _send(Event(error=str(error)))
    except (OSError, SafetensorError, ValueError) as error:
        _send(Event(error=f"The demo model could not be built: {error}."))
    else:
        return 0
    return 1


def _send(event: Event) -> None:
    # A write to a parent that is gone fails with a broken pipe, which ends this process as well.
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
