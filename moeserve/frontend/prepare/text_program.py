"""The program of the text processes: `python -m MODULE [--check] MODEL_DIR CALLS REASONING`.

It loads a checkpoint's tokenizer and chat template once and forks a worker for each request on its standard input, a
socket: a worker that had to be ended is replaced within milliseconds, and all share tokenizer and template. A
request carries the worker's own socket and its page (`messages.py`). A worker sends its process number, then answers
one ask after another until its socket ends. CALLS and REASONING are the settings of `choose_shape`.

With `--check` the program loads the tokenizer and renders a first conversation once, before anything else does: the
libraries that read these files can abort. It prints a line of JSON for each part before it is loaded, and one for what
is wrong, if anything.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.shape import choose_shape, model_type_of
from moeserve.frontend.prepare.prepare import Preparer, make_programs
from moeserve.frontend.prepare.templates import ChatTemplate, load_chat_template, read_sources
from moeserve.frontend.prepare.text_messages import (
    PAGE_BYTES,
    SIZE_BYTES,
    Defect,
    Watch,
    address_space,
    bound_pools,
    give_back,
    limit_cpu,
    limit_memory,
    pack_reply,
    unpack_ask,
)
from moeserve.frontend.text import TextTokenizer
from moeserve.grammars.compiler import GrammarError
from moeserve.grammars.tokens import load_tokens
from moeserve.model.spec import ModelError

CPU_SECONDS = struct.Struct("d")
_BIG_FRAME_BYTES = 256 * 1024  # after a longer ask or reply its memory is returned to the system
_LOADING_CPU_SECONDS = {"tokenizer": 60.0, "chat template": 2.0}
_TOKENIZER_MEMORY_BYTES = 4 * 2**30
_TEMPLATE_MEMORY_BYTES = 512 * 2**20
_MAX_REQUEST_BYTES = 4096


class CheckLine(msgspec.Struct, omit_defaults=True):
    """A line of `--check`: the part that is loaded next, or its fault. swelled: it took too much memory."""

    part: str | None = None
    error: str | None = None
    swelled: bool = False


class Nursery:
    """Forks workers, which share the memory of the programs that this process has loaded."""

    def __init__(self, folder: Path, calls: str, reasoning: str) -> None:
        self._folder = folder
        self._tokenizer = TextTokenizer.from_file(folder / "tokenizer.json")
        self._template: ChatTemplate | None = load_chat_template(folder)
        self._shape = choose_shape(
            read_sources(folder), model_type_of(folder), calls, reasoning, self._tokenizer.added_ids
        )
        self._grammar_tokens: LLTokenizer | None = None

    def run(self, control: socket.socket) -> None:
        """Fork a worker for each request until the socket ends."""
        gc.collect()
        gc.freeze()
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 2)
            if not request:
                return
            self._load_grammar_tokens(msgspec.json.decode(request, type=list[int]))
            if os.fork() == 0:
                control.close()
                self._work(*descriptors)
                os._exit(0)
            for descriptor in descriptors:
                os.close(descriptor)

    def _load_grammar_tokens(self, eos_token_ids: list[int]) -> None:
        """Load the tables of grammars once the ids are known; workers that were forked before load them themselves."""
        if eos_token_ids and self._grammar_tokens is None:
            with suppress(GrammarError):  # a request with a grammar gets the error
                self._grammar_tokens = load_tokens(self._folder / "tokenizer.json", eos_token_ids)
                gc.freeze()

    def _work(self, connection_fd: int, page_fd: int) -> None:
        """Answer asks until the socket ends. The process ends by a signal if one takes more time than it may."""
        watch = Watch(mmap.mmap(page_fd, PAGE_BYTES))
        programs = make_programs(self._folder, self._tokenizer, self._template, watch, self._grammar_tokens)
        preparer = Preparer(self._tokenizer, self._shape, watch, programs)
        with (
            suppress(ConnectionError),  # the frontend has left
            socket.socket(fileno=connection_fd) as connection,
            connection.makefile("rb") as asks,
        ):
            connection.sendall(os.getpid().to_bytes(SIZE_BYTES))
            while len(size := asks.read(SIZE_BYTES)) == SIZE_BYTES:
                frame = asks.read(int.from_bytes(size))
                began = time.process_time()
                answer = _answer(preparer, watch, frame)
                used = CPU_SECONDS.pack(time.process_time() - began)
                connection.sendall(len(answer).to_bytes(SIZE_BYTES) + used + answer)
                if max(len(frame), len(answer)) > _BIG_FRAME_BYTES:
                    del frame, answer
                    give_back()


def _answer(preparer: Preparer, watch: Watch, frame: bytes) -> bytes:
    try:
        return pack_reply(preparer.prepare(*unpack_ask(frame)))
    except MemoryError:
        return pack_reply(watch.refusal())
    except Exception:  # A defect here is its request's alone.
        return pack_reply(Defect(traceback.format_exc().encode("utf-8", "backslashreplace").decode()))


def check(folder: Path) -> None:
    """Load both parts as text processes will. Raise ModelError, or MemoryError for a part that takes too much."""
    _begin("tokenizer", _TOKENIZER_MEMORY_BYTES)
    tokenizer = TextTokenizer.from_file(folder / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("Hi, 1 \u00e9"))
    _begin("chat template", _TEMPLATE_MEMORY_BYTES)
    template = load_chat_template(folder)
    if template is not None:
        try:
            template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        except ApiError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
            # The template may want other conversations.
    limit_cpu(0)


def _begin(part: str, most_bytes: int) -> None:
    _say(CheckLine(part=part))
    limit_cpu(_LOADING_CPU_SECONDS[part])
    limit_memory(address_space() + most_bytes)


def _say(line: CheckLine) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def main() -> None:
    """Check or serve the folder that the command line names."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A library's threads would not be there after a fork, and one text is tokenised by one thread anyway.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if sys.argv[1] == "--check":
        try:
            check(Path(sys.argv[2]))
        except ModelError as error:
            _say(CheckLine(error=str(error)))
        except MemoryError:
            _say(CheckLine(swelled=True))
        return
    bound_pools()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    # Sent to a whole control group, these are for the supervisor.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    folder, calls, reasoning = sys.argv[1:]
    with socket.socket(fileno=sys.stdin.fileno()) as control:
        Nursery(Path(folder), calls, reasoning).run(control)


if __name__ == "__main__":
    main()
