"""Compile kernels into Triton's cache before their first launch, in several processes.

`caught_launches` collects the kernels that would be launched, and `compile_ahead` compiles them. Each process is this
module: it reads a `Compilation` per line and answers with a line. It needs no device, and ends when its input does, so
it never outlives the service. A kernel that no process could compile is compiled at its first launch, which raises the
compiler's error.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from kernels.gpu.packed_rows import PackedForm

# Called with the number of kernels that are compiled and the number of all kernels.
Compiled = Callable[[int, int], None]

_MOST_PROCESSES = 16  # each takes some 500 MB of memory
_FORM = "packed form"


@dataclass(frozen=True)
class Compilation:
    """A kernel and everything that decides its binary, in the types of JSON.

    constants, attributes: pairs of an argument's place and its value. target: backend, architecture and warp size.
    """

    module: str
    function: str
    signature: dict[str, str]
    constants: list[tuple[list[int], Any]]
    attributes: list[tuple[list[int], Any]]
    options: dict[str, Any]
    target: tuple[str, int, int]

    def is_cached(self) -> bool:
        """Return whether Triton's cache holds the binary."""
        try:
            self._compile(_CachedSource)
        except _NotCachedError:
            return False
        return True

    def compile(self) -> None:
        self._compile(ASTSource)

    def _compile(self, kind: type[ASTSource]) -> None:
        function = getattr(importlib.import_module(self.module), self.function)
        constants = {tuple(place): _decoded(value) for place, value in self.constants}
        attributes = {tuple(place): value for place, value in self.attributes}
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        source = kind(function, self.signature, constants, attributes)
        triton.compile(source, target=GPUTarget(*self.target), options=options)


class _NotCachedError(Exception):
    pass


class _CachedSource(ASTSource):  # type: ignore[misc]  # triton has no types
    """A source whose compilation finds the binary in the cache or fails."""

    def make_ir(self, *_: Any, **__: Any) -> Any:
        """Begin to compile, which Triton does for a source that is not cached."""
        raise _NotCachedError


@contextmanager
def caught_launches() -> Iterator[set[str]]:
    """Launch no kernel that is not compiled yet; yield a set that fills with a `Compilation` in JSON for each of them.

    Outputs of kernels stay as they are.
    """
    found: set[str] = set()
    target = driver.active.get_current_target()

    def catch(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        said = json.loads(compile["specialization_data"])
        constants = [(list(place), _encoded(value)) for place, value in compile["constants"].items()]
        attributes = list(zip(said["attrs_keys"], said["attrs_vals"], strict=True))
        kernel = Compilation(
            fn.module,
            fn.name,
            said["signature"],
            constants,
            attributes,
            said["options"],
            (target.backend, target.arch, target.warp_size),
        )
        found.add(json.dumps(asdict(kernel)))
        return True

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = catch
        yield found


def compile_ahead(
    kernels: Collection[str], told: Compiled, num_processes: int | None = None, place: tuple[int, int] = (0, 1)
) -> list[str]:
    """Compile kernels, as `caught_launches` yields them, that Triton's cache lacks. Return a line for each failure.

    num_processes: at most, default a rank's share of the cores. place: the number of this rank, and of how many. Ranks,
    whose kernels are much the same, each begin with another one and find what others have compiled.
    """
    rank, num_ranks = place
    missing = [kernel for kernel in sorted(kernels) if not Compilation(**json.loads(kernel)).is_cached()]
    found, total, failures = len(kernels) - len(missing), len(kernels), list[str]()
    told(found, total)
    if not missing:
        return failures
    first = len(missing) * rank // num_ranks
    missing = missing[first:] + missing[:first]
    of_cores = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0))) // num_ranks)
    count = min(len(missing), num_processes or of_cores)
    with _processes(count) as idle, ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(_compile_in, idle, kernel) for kernel in missing]
        for number, answer in enumerate(as_completed(answers), found + 1):
            if (failure := answer.result()) is not None:
                failures.append(failure)
            told(number, total)
    return failures


@contextmanager
def _processes(count: int) -> Iterator[SimpleQueue[subprocess.Popen[str]]]:
    """Yield a queue of idle processes that compile; end them afterwards."""
    command = [sys.executable, "-P", "-m", __name__]
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(count):
            # A session of their own: a terminal's interrupt is for the service, whose end closes their input.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.callback(_end, process)
            idle.put(process)
        yield idle


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError), process:  # closing a pipe writes what a process has not taken
        pass


def _compile_in(idle: SimpleQueue[subprocess.Popen[str]], kernel: str) -> str | None:
    """Have an idle process compile a kernel; return why it did not, None if it did."""
    process = idle.get()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{kernel}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError as error:
        answer = json.dumps(str(error))
    finally:
        idle.put(process)
    failure = json.loads(answer) if answer else "the process ended"
    return None if failure is None else f"{json.loads(kernel)['function']}: {failure}"


def _encoded(value: Any) -> Any:
    return {_FORM: [value.name, value.depth, value.in_fp8]} if isinstance(value, PackedForm) else value


def _decoded(value: Any) -> Any:
    return PackedForm(*value[_FORM]) if isinstance(value, dict) else value


def main() -> None:
    """Compile the kernels of standard input; answer each with null or the reason of a failure, in JSON."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where compilers may print
    for line in sys.stdin:
        failure = None
        try:
            Compilation(**json.loads(line)).compile()
        except Exception as error:  # whatever a compiler raises is told
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps(failure), file=answers, flush=True)


if __name__ == "__main__":
    main()
