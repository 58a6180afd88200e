"""Renders a checkpoint's chat template: `python -m MODULE [--check] MODEL_DIR`.

A process of its own, since a template is a program of somebody else's: one that takes too long ends the process by a
signal, and one that takes too much memory by the failed allocation.

With `--check` it loads the tokenizer and renders a first conversation once, before the frontend does: the libraries
that read these files can abort. It prints the name of each part before it is loaded, then what is wrong, if anything.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

from moeserve.frontend.http import ApiError
from moeserve.frontend.job_program import limit_cpu, serve_jobs
from moeserve.frontend.limits import RENDER_CPU_SECONDS
from moeserve.frontend.templates import ChatTemplate, load_chat_template
from moeserve.frontend.text import TextTokenizer
from moeserve.model.spec import ModelError

TEXT, REFUSED = b"\0", b"\1"
FAILED = "error: "
_LOADING_CPU_SECONDS = {"tokenizer": 60.0, "chat template": 2.0}
_TOKENIZER_MEMORY_BYTES = 4 * 2**30
_TEMPLATE_MEMORY_BYTES = 512 * 2**20
_STATM = Path("/proc/self/statm")


# Messages, and what else `ChatTemplate.render` takes by name.
Job = tuple[list[dict[str, Any]], dict[str, Any]]


def answer(template: ChatTemplate, job: Job) -> bytes:
    """Return the text of a job behind `TEXT`, or why there is none behind `REFUSED`."""
    messages, arguments = job
    try:
        return TEXT + template.render(messages, **arguments).encode()
    except ApiError as error:
        return REFUSED + error.message.encode("utf-8", "replace")
    except UnicodeEncodeError:
        return REFUSED + b"The chat template gives text that is not Unicode"


def limit_memory(further_bytes: int) -> None:
    """Let this process take so many bytes beside what it has."""
    pages = int(_STATM.read_text().split()[0])
    limit = pages * resource.getpagesize() + further_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def check(folder: Path) -> None:
    """Load both parts as the frontend will. Raises ModelError, or MemoryError for what takes too much."""
    _begin("tokenizer")
    limit_memory(_TOKENIZER_MEMORY_BYTES)
    tokenizer = TextTokenizer.from_file(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("Hi, 1 \u00e9"))
    _begin("chat template")
    limit_memory(_TEMPLATE_MEMORY_BYTES)
    template = load_chat_template(folder)
    if template is not None:
        try:
            template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except ApiError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
            # It may want other conversations.
    limit_cpu(0)


def _begin(part: str) -> None:
    print(part, flush=True)
    limit_cpu(_LOADING_CPU_SECONDS[part])


def serve(folder: Path) -> None:
    """Answer jobs until the input ends. The process ends by SIGPROF if one takes more time than it may."""
    template = load_chat_template(folder)
    assert template is not None
    limit_memory(_TEMPLATE_MEMORY_BYTES)

    def render(data: bytes) -> bytes:
        job = json.loads(data)
        limit_cpu(RENDER_CPU_SECONDS)
        return answer(template, job)

    serve_jobs(render)


def main() -> None:
    """Check or serve the folder that the command line names."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.argv[1] != "--check":
        serve(Path(sys.argv[1]))
        return
    try:
        check(Path(sys.argv[2]))
    except ModelError as error:
        print(f"{FAILED}{error}", flush=True)
    except MemoryError:
        print(f"{FAILED}it takes too much memory", flush=True)


if __name__ == "__main__":
    main()
