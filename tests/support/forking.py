"""Python programs forked from a process that has imported torch and the service, in place of interpreters started anew.

`popen` stands in for `subprocess.Popen` of `python -m MODULE`. A server process, one for all processes of a run of
pytest, has imported what the service imports and nothing more, or, without torch, what the supervisor's stand-ins
import. It runs no threads and touches no tensor, and forks a program for each request. What a program starts with
`python -m` is forked from that program in turn: the supervisor starts worker and frontend, torchrun's agent its ranks.
Everything else is as it is after `exec`: pid, parent, session, descriptors, environment, signals, arguments, working
directory, `launcher.child` with its death signal, and what `/proc` says.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
_LARGEST_REQUEST = 1 << 17
_MOST_DESCRIPTORS = 16
_HELLO = b"hello"
# Room for the command line and the environment of a forked program, where `/proc` looks for them.
_ROOM = "x" * 4096
# Taken before a forked program has another in its place.
_EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = inspect.signature(_EXECUTE)


def popen(command: list[str], *, torch: bool = True, **options: Any) -> subprocess.Popen[Any]:
    """A program forked from a server.

    command, options: as `subprocess.Popen` takes them; torch: whether the server has imported it.
    """
    return (_ServedPopen if torch else _ServedPopenWithoutTorch)(command, **options)


class _Job:
    """A program to run, as `subprocess.Popen` asks for it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.command = [os.fspath(part) for part in arguments["args"]]
        self.environment = dict(os.environ if arguments["env"] is None else arguments["env"])
        self.folder = os.fspath(arguments["cwd"] or os.getcwd())
        streams = ((arguments["p2cread"], 0), (arguments["c2pwrite"], 1), (arguments["errwrite"], 2))
        self.streams = [own if given == -1 else given for given, own in streams]
        # By the numbers that the program knows, the numbers in this process.
        self.kept = {number: number for number in arguments["pass_fds"]}
        self.umask = arguments["umask"]
        self.own_session = bool(arguments["start_new_session"])

    def is_module(self) -> bool:
        return self.command[0] == sys.executable and "-m" in self.command[1:5]


def _called(call: Any, *arguments: Any) -> dict[str, Any]:
    return _SIGNATURE.bind(call, *arguments).arguments


def _close_given(asked: dict[str, Any]) -> None:
    """Closes the child's ends of pipes, and of /dev/null, which are the child's alone from now on."""
    pairs = (("p2cread", "p2cwrite"), ("c2pwrite", "c2pread"), ("errwrite", "errread"))
    devnull = getattr(asked["self"], "_devnull", None)
    mine = {asked[child] for child, parent in pairs if asked[child] != -1 and asked[parent] != -1}
    for descriptor in mine if devnull is None else mine | {devnull}:
        os.close(descriptor)


class _ServedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """The program is a child of the server, which reports the exit status."""

    _imports = "service"

    def _execute_child(self, *arguments: Any) -> None:
        asked = _called(self, *arguments)
        job = _Job(asked)
        assert job.is_module(), job.command
        self._told, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"command": job.command, "environment": job.environment, "folder": job.folder, "kept": [*job.kept]}
        with told:
            descriptors = [told.fileno(), *job.streams, *job.kept]
            connection = _SERVERS.connection(self._imports, job.environment.get("PYTHONPATH", ""))
            socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        self.pid = int(self._told.recv(64))
        self._child_created = True
        _close_given(asked)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            said = self._told.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._told.close()
        return self.pid, int(said) if said else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._told.fileno() == -1:
            # Python goes on to poll a process that was forgotten, together with its socket, before it ended.
            self.returncode = _deadstate
        elif self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


class _ServedPopenWithoutTorch(_ServedPopen):
    _imports = "supervisor"


def _execute_or_fork(call: Any, *arguments: Any) -> None:
    """In a forked program: modules are forked from it, other programs are executed."""
    asked = _called(call, *arguments)
    job = _Job(asked) if isinstance(asked["args"], list | tuple) and not asked["shell"] else None
    if job is None or not job.is_module() or asked["preexec_fn"] is not None:
        _EXECUTE(call, *arguments)
        return
    call.pid = _fork(job)
    call._child_created = True
    _close_given(asked)


def _fork(job: _Job) -> int:
    """Returns the child's pid in this process, and never in the child."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that came to the child before it has handlers of its own would be told to the parent's loop.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    else:
        # Objects of the parent's would close descriptors that are the child's now, were they ever collected.
        gc.freeze()
        _become(job)
    return pid


def _become(job: _Job) -> NoReturn:
    status = 1
    try:
        _take_over(job)
        module, arguments = _parsed(job.command)
        _run(module, arguments)
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_finished(status))


def _take_over(job: _Job) -> None:
    """Makes this process what a new interpreter would be."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(None)
    if job.own_session:
        os.setsid()
    if job.umask >= 0:
        os.umask(job.umask)
    _place(dict(enumerate(job.streams)) | job.kept)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    _show(job)


def _place(wanted: dict[int, int]) -> None:
    """Have each descriptor under its number, the key, and no others."""
    # First out of each other's way: one may be given under the number of another.
    above = {number: fcntl.fcntl(given, fcntl.F_DUPFD, max(wanted) + 1) for number, given in wanted.items()}
    for number, given in above.items():
        os.dup2(given, number)
    for low, high in pairwise([*sorted(above), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def _show(job: _Job) -> None:
    """Has `/proc` show the command line and the environment of the program, cut off where they are longer than the
    server's. Nothing refers to the server's own strings any more."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    shown = (job.command, [f"{name}={value}" for name, value in job.environment.items()])
    for strings, first in ((shown[0], 45), (sorted(shown[1], key=len), 47)):
        begin, end = int(fields[first]), int(fields[first + 1])
        text = b"".join(os.fsencode(part) + b"\0" for part in strings)[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _parsed(command: list[str]) -> tuple[str, list[str]]:
    """Module and arguments of a `python [OPTION]... -m MODULE [ARGUMENT]...`."""
    at = command.index("-m") + 1
    return command[at], command[at + 1 :]


def _run(module: str, arguments: list[str]) -> None:
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        # The library read the environment when it was loaded.
        sys.modules["torch"].set_num_threads(int(threads))
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ and "prometheus_client.values" in sys.modules:
        importlib.reload(sys.modules["prometheus_client.values"])
    if "sitecustomize" in sys.modules:
        # The environment that it changes was the server's.
        importlib.reload(sys.modules["sitecustomize"])
    subprocess.Popen._execute_child = _execute_or_fork  # type: ignore[attr-defined]
    # A module that the server has imported is to run once more, as a program.
    for again in {module, arguments[1] if module == "launcher.child" else module}:
        sys.modules.pop(again, None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _finished(status: int) -> int:
    """Ends as an interpreter does: threads, registered functions, buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        return 120
    return status


# The server.


class _Servers:
    """This process's connections to the servers of its run of pytest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, str], socket.socket] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def connection(self, imports: str, python_path: str) -> socket.socket:
        """A connection to a server, started by the first process that needs it; one server for each key of `_IMPORTS`
        and each PYTHONPATH, where `sitecustomize` may lie. It ends when nothing is connected any more."""
        with self._lock:
            if not self._connections:
                atexit.register(self._end)
            key = (imports, python_path)
            if key not in self._connections:
                self._connections[key] = self._connect(*key)
                self._connections[key].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST_REQUEST)
            return self._connections[key]

    def _connect(self, imports: str, python_path: str) -> socket.socket:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = f"\0moeserve-{sha256(f'{run} {ROOT} {imports} {python_path}'.encode()).hexdigest()}"
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError:
                    connection = _connected(address)
                    if connection is not None:
                        return connection
                else:
                    listener.listen(64)
                    server, connection = _start_server(listener, imports, python_path)
                    self._started.append(server)
                    return connection

    def _end(self) -> None:
        # First all of them: a server that another process has started waits for these, as this one's for its.
        for connection in self._connections.values():
            connection.close()
        for server in self._started:
            server.wait()


_SERVERS = _Servers()


def _connected(address: str) -> socket.socket | None:
    """None where the server is not there yet, or ends."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        if connection.recv(len(_HELLO)):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start_server(
    listener: socket.socket, imports: str, python_path: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The server and its first connection."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = [listener.fileno(), there.fileno()]
    with there:
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.support.forking", imports, *map(str, descriptors), _ROOM],
            cwd=ROOT,
            pass_fds=descriptors,
            # Libraries read these settings when they are loaded; the service sets them.
            env=os.environ
            | {
                "PYTHONPATH": python_path,
                "ROOM": 4 * _ROOM,
                "OMP_NUM_THREADS": "2",
                "OPENBLAS_NUM_THREADS": "1",
                "GOMP_SPINCOUNT": "2000",
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "DS_ACCELERATOR": "cpu",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )
    return server, here


def _import_the_service() -> list[Callable[..., Any]]:
    """Imports what a service would, and returns something of each part."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import run
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvloop import new_event_loop

    from launcher.rank_group import main as run_ranks
    from launcher.serve import serve
    from launcher.worker import main as work
    from moeserve.engine.ranked_service import load_member
    from moeserve.engine.service import serve_alone
    from moeserve.frontend.server import serve as serve_http
    from moeserve.model.source import resolve_model

    # It names its caller in events that nobody reads, and looks through all modules for that: a second for each group.
    dynamic_rendezvous.get_method_name = lambda *_: "rendezvous"
    # Imported once a model's configuration is asked for.
    mixtral = CONFIG_MAPPING["mixtral"]
    service: list[Callable[..., Any]] = [
        run_ranks,
        serve.main,
        work,
        serve_http,
        resolve_model,
        load_member,
        serve_alone,
    ]
    return [run, mixtral, HttpToolsProtocol, new_event_loop, *service]


def _import_the_supervisor() -> list[Callable[..., Any]]:
    """Imports what the command line, the supervisor and its stand-in children would."""
    from http.server import HTTPServer

    from launcher.cli import main
    from launcher.run_directory import run_directory
    from launcher.serve import serve
    from launcher.supervisor import Supervisor

    return [HTTPServer, main, run_directory, serve.main, Supervisor]


_IMPORTS = {"service": _import_the_service, "supervisor": _import_the_supervisor}


def main() -> None:
    """Forks a program for each request until nobody is connected.

    `python -m tests.support.forking IMPORTS LISTENER FIRST` takes a key of `_IMPORTS` and the descriptors of a socket
    that listens and of the first connection.
    """
    listener, first = (socket.socket(fileno=int(number)) for number in sys.argv[2:4])
    _IMPORTS[sys.argv[1]]()
    has_device = "TRITON_INTERPRET" in os.environ
    assert has_device or not any(name.startswith("kernels.gpu") for name in sys.modules), "they are made for a device"
    assert len(os.listdir("/proc/self/task")) == 1, "threads would be missing in forked programs"
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        # The server's own objects, libraries of torch for one, are not each program's to take apart at its end.
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    _Server(listener, first).serve()


class _Server:
    def __init__(self, listener: socket.socket, first: socket.socket) -> None:
        self._listener = listener
        self._connections = {first.fileno(): first}
        # By pidfd: the pid, and where its exit status is told.
        self._running: dict[int, tuple[int, socket.socket]] = {}
        self._poll = select.poll()
        for connection in (listener, first):
            self._poll.register(connection, select.POLLIN)

    def serve(self) -> None:
        while self._connections:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._running:
                    self._poll.unregister(descriptor)
                    _tell_the_end(*self._running.pop(descriptor))
                    os.close(descriptor)
                elif descriptor in self._connections:
                    self._answer(self._connections[descriptor])
                else:
                    self._accept()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.send(_HELLO)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST_REQUEST, _MOST_DESCRIPTORS)
        if message:
            pidfd, started = _start(json.loads(message), descriptors)
            self._running[pidfd] = started
            self._poll.register(pidfd, select.POLLIN)
        else:
            self._poll.unregister(connection)
            del self._connections[connection.fileno()]
            connection.close()


def _start(request: dict[str, Any], descriptors: list[int]) -> tuple[int, tuple[int, socket.socket]]:
    told, *given = descriptors
    job = _Job(
        {
            "args": request["command"],
            "env": request["environment"],
            "cwd": request["folder"],
            "p2cread": given[0],
            "c2pwrite": given[1],
            "errwrite": given[2],
            "pass_fds": (),
            "umask": -1,
            "start_new_session": False,
        }
    )
    job.kept = dict(zip(request["kept"], given[3:], strict=True))
    pid = _fork(job)
    for descriptor in given:
        os.close(descriptor)
    connection = socket.socket(fileno=told)
    connection.send(str(pid).encode())
    return os.pidfd_open(pid), (pid, connection)


def _tell_the_end(pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with connection:
        try:
            connection.send(str(status).encode())
        except OSError:
            # Nobody waits for it any more.
            return


if __name__ == "__main__":
    # One module of this name, whichever program imports it.
    sys.modules["tests.support.forking"] = sys.modules["__main__"]
    main()
