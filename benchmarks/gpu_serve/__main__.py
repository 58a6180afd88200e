"""`python -m benchmarks.gpu_serve`: serve on a GPU, and write what was right, how fast it was, and what failed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu import Deadline
from benchmarks.gpu_serve.lab import INTERPRETED, ON_GPU, Lab
from benchmarks.gpu_serve.run import Report, run_stages
from benchmarks.gpu_serve.service import Popen
from benchmarks.gpu_serve.stages import STAGES
from moeserve.device import cuda_absence

_SECONDS = 510.0


def main(arguments: Sequence[str] | None = None, popen: Popen = subprocess.Popen) -> int:
    """Return 1 if a stage failed, 2 where no GPU can be used. popen: starts services."""
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--only", action="append", choices=names, help="a stage; may be given several times")
    parser.add_argument("--time-limit", type=float, default=_SECONDS, help="seconds (%(default)s)")
    parser.add_argument("--interpret", action="store_true", help="tiny sizes in Triton's interpreter, for no figures")
    options = parser.parse_args(arguments)
    if not options.interpret and (absence := cuda_absence(False)) is not None:
        print(f"Error: {absence}.", file=sys.stderr)
        return 2
    scale, deadline = INTERPRETED if options.interpret else ON_GPU, Deadline(options.time_limit)
    logs = options.out_dir / "gpu-serve-logs"
    logs.mkdir(parents=True, exist_ok=True)
    report = Report(options.out_dir / f"serve-{_device(options.interpret)}.md", "A service on a GPU")
    stages = [stage for stage in STAGES if not options.only or stage.name in options.only]
    with TemporaryDirectory(prefix="moeserve-gpu-serve-") as scratch:
        return int(not run_stages(stages, Lab(scale, logs, Path(scratch), popen), report, deadline))


def _device(interpret: bool) -> str:
    if interpret:
        return "interpreter"
    import torch

    from benchmarks.gpu import file_stem, gpu_name

    return file_stem(gpu_name(torch.device("cuda")))


if __name__ == "__main__":
    sys.exit(main())
