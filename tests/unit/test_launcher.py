"""The parts of the launcher that need no second process."""

import fcntl
import io
import os
import re
import signal
import socket
import stat
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from launcher import preflight
from launcher.cli import main
from launcher.console import ProgressDisplay, ready_banner
from launcher.preflight import LaunchError, is_loopback, open_listener, reachable_address, url, usable_cores
from launcher.processes import child_environment, computing_environment, decode_status
from launcher.run_directory import hash_model, remove_stale, run_directory
from launcher.serve import notify_systemd, pat_watchdog, progress_display
from moeserve.config import ServeConfig
from moeserve.statuses import Failed, Loading, Ready
from tests.support.service import descendants, read_of_process, wait_until

READY = Ready(
    device="cpu",
    dtype="float32",
    weights_bytes=600 * 2**20,
    kv_bytes=2**30,
    num_blocks=1000,
    block_size=16,
    max_model_len=4096,
    model_max_len=8192,
)


def test_progress_keeps_to_one_line_of_a_terminal():
    written = io.StringIO()
    display = ProgressDisplay(Console(file=written, force_terminal=True, width=80, color_system=None))
    display.update("read source", 0, 0)
    display.update("loading 0.7 GiB of weights for float32", 700 * 2**20, 766 * 2**20)
    display.close()
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", written.getvalue()).splitlines()]
    assert "700 MiB/766 MiB" in lines[-1]
    assert all(re.fullmatch(r"(read|loading) .*\d:\d\d:\d\d|", line) for line in lines)


@pytest.mark.parametrize(
    ("log_format", "shown"), [("auto", "loading weights\n"), ("console", "loading weights\n"), ("json", "")]
)
def test_no_line_of_progress_stands_among_lines_of_json(log_format, shown):
    written = io.StringIO()
    display = progress_display(ServeConfig(log_format=log_format), Console(file=written))
    display.update("loading weights", 1, 2)
    display.close()
    assert written.getvalue() == shown


@pytest.mark.parametrize(
    ("flags", "here"),
    [
        ("--ctx-size 4096", "--ctx-size. Here --max-model-len sets the context."),
        ("-c 4096", "-c. Here --max-model-len sets the context."),
        ("-ngl 99", "-ngl. Here a model is whole on one device, see --device."),
        ("-hf owner/name", "-hf. Here MODEL is the first argument."),
        ("--tp-size=2", "--tp-size. Here --tensor-parallel-size N is for heads, channels and experts."),
    ],
)
def test_flags_of_other_servers_are_refused_with_what_is_here(flags, here):
    result = CliRunner().invoke(main, ["serve", *flags.split()])
    assert (result.exit_code, f"Error: No such option: {here}\n" in result.output) == (2, True)


def test_the_banner_says_where_how_and_with_what():
    text = ready_banner(READY, url="http://127.0.0.1:8000", model="demo", needs_key=False, gpus=["NVIDIA H200"])
    assert "ready on http://127.0.0.1:8000" in text
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions -H" in text
    assert "1 GiB = 16,000 tokens in 1,000 blocks" in text
    assert "4,096 tokens per request of the model's 8,192" in text
    assert "NVIDIA H200 found, not used" in text


def test_the_banner_names_the_flag_that_serves_the_models_whole_context():
    little = msgspec.structs.replace(READY, max_model_len=16_000, model_max_len=32_000)
    text = ready_banner(little, url="http://x", model="demo", needs_key=False, gpus=[])
    assert "context  16,000 tokens per request of the model's 32,000: --kv-cache-memory 2GiB holds them all" in text


def test_the_banner_says_what_the_demo_is_for_and_where_kv_is_kept():
    text = ready_banner(READY, url="http://x", model="demo", needs_key=False, gpus=[], is_demo=True, disk="KV is in kv")
    assert "demo     demo model, 135M parameters: for trying the service, not its knowledge" in text
    assert "disk     KV is in kv" in text
    assert "135M" not in ready_banner(READY, url="http://x", model="m", needs_key=False, gpus=[])


def test_the_banner_tells_whether_positions_are_stretched_and_what_stretches_them():
    stretched = msgspec.structs.replace(READY, max_model_len=32768, model_max_len=32768, short_context=8192)
    text = ready_banner(stretched, url="http://x", model="demo", needs_key=False, gpus=[])
    assert "32,768 tokens per request; positions are stretched, as --max-model-len is beyond 8,192" in text
    short = msgspec.structs.replace(stretched, max_model_len=8192)
    text = ready_banner(short, url="http://x", model="demo", needs_key=False, gpus=[])
    assert "8,192 tokens per request of the model's 32,768; --max-model-len beyond 8,192 stretches positions" in text
    assert "stretched" not in ready_banner(READY, url="http://x", model="demo", needs_key=False, gpus=[])


def test_the_banner_tells_of_recurrent_states_where_there_are_some():
    with_states = msgspec.structs.replace(READY, num_state_slots=8, num_snapshots=16, state_row_bytes=64 * 2**20)
    line = "states   1.5 GiB = 8 requests at once and 16 snapshots of prefixes, 64 MiB each"
    for ready, said in ((READY, False), (with_states, True)):
        text = ready_banner(ready, url="http://x", model="demo", needs_key=False, gpus=[])
        assert (line in text) == said


def test_the_start_names_the_kernels_that_compute_or_says_why_there_are_none():
    for ready, said in (
        (msgspec.structs.replace(READY, kernels="avx512-vnni, of the wheel"), "kernels  avx512-vnni, of the wheel"),
        (msgspec.structs.replace(READY, no_compiled_kernels="No compiler."), "kernels  torch, several times slower"),
    ):
        text = ready_banner(ready, url="http://x", model="demo", needs_key=False, gpus=[])
        assert said in text
        assert text.count("kernels  ") == 1


def test_the_banner_tells_of_window_blocks_where_there_are_some():
    with_windows = msgspec.structs.replace(READY, num_window_blocks=1200, window=128)
    line = "windows  1,200 blocks of the KV for layers that see the last 128 tokens"
    for ready, said in ((READY, False), (with_windows, True)):
        text = ready_banner(ready, url="http://x", model="demo", needs_key=False, gpus=[])
        assert (line in text) == said


def test_the_banner_asks_for_the_key_without_showing_one():
    text = ready_banner(READY, url="http://x", model="demo", needs_key=True, gpus=[])
    assert "Bearer $MOESERVE_API_KEY" in text


def test_statuses_are_told_apart_by_their_event():
    assert decode_status(b'{"event":"loading","done":1,"total":2}') == Loading(1, 2)
    assert decode_status(b'{"event":"error","message":"no"}') == Failed("no")
    assert isinstance(decode_status(b"nonsense"), Failed)


def test_a_listener_on_every_address_is_reached_through_loopback():
    with open_listener("0.0.0.0", 0) as listener:
        host, port = reachable_address(listener)
        assert url((host, port)) == f"http://127.0.0.1:{port}"
    assert url(("::1", 80)) == "http://[::1]:80"


@pytest.mark.parametrize(("host", "local"), [("localhost", True), ("127.0.0.2", True), ("0.0.0.0", False)])
def test_loopback_is_recognised(host, local):
    assert is_loopback(host) == local


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(LaunchError, match=r"no address 192\.0\.2\.1"):
        open_listener("192.0.2.1", 0)


def test_the_run_directory_is_private_and_removed():
    # A short path: sockets do not go into a deep one.
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        with run_directory({"XDG_RUNTIME_DIR": base}) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert path.parent == Path(base)
        assert list(Path(base).iterdir()) == []


def janitors_of(path: Path) -> list[int]:
    return [pid for pid in descendants(os.getpid()) if str(path) in read_of_process(pid, "cmdline")]


def test_a_janitor_that_was_stopped_ends_by_itself(monkeypatch):
    codes, kill = [], subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: codes.append(process.returncode) or kill(process))
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        with run_directory({"XDG_RUNTIME_DIR": base}) as path:
            # Other tests' programs may be forked from a child of this process meanwhile. A program's command line is
            # there a moment after its start.
            wait_until(lambda: janitors_of(path))
            [janitor] = janitors_of(path)
            os.kill(janitor, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(janitor, os.WUNTRACED)[1])
        assert list(Path(base).iterdir()) == []
    assert codes == [0]


def test_a_run_directory_too_deep_for_sockets_goes_elsewhere(tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with run_directory({"XDG_RUNTIME_DIR": str(deep)}) as path:
        assert len(str(path / "heartbeat.4294967295")) <= 107


def test_only_directories_of_dead_supervisors_are_removed(tmp_path):
    for name in ("dead", "alive"):
        (tmp_path / f"moeserve-{name}").mkdir()
        (tmp_path / f"moeserve-{name}" / "lock").touch()
    (tmp_path / "moeserve-other").mkdir()
    lock = os.open(tmp_path / "moeserve-alive" / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    remove_stale(tmp_path)
    os.close(lock)
    assert {path.name for path in tmp_path.iterdir()} == {"moeserve-alive", "moeserve-other"}


def test_cores_are_cut_to_the_quota_of_the_container(tmp_path):
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == len(os.sched_getaffinity(0))
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == len(os.sched_getaffinity(0))
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1


def test_children_inherit_no_settings_and_no_keys():
    inherited = child_environment({"MOESERVE_API_KEY": "secret", "NOTIFY_SOCKET": "s", "HOME": "/h"}, threads=2)
    assert "MOESERVE_API_KEY" not in inherited
    assert "NOTIFY_SOCKET" not in inherited
    assert inherited["HOME"] == "/h"
    assert inherited["OMP_NUM_THREADS"] == "2"


def test_processes_of_a_reproducible_service_take_its_kernels_unless_the_user_names_others():
    assert "MOESERVE_CPU_KERNELS" not in computing_environment({}, ServeConfig(threads=1))
    config = ServeConfig(threads=3, reproducible=True)
    assert computing_environment({}, config)["MOESERVE_CPU_KERNELS"] == "reproducible"
    assert computing_environment({}, config)["OMP_NUM_THREADS"] == "3"
    named = {"MOESERVE_CPU_KERNELS": "x86-64-v3"}
    assert computing_environment(named, config)["MOESERVE_CPU_KERNELS"] == "x86-64-v3"


def test_another_distribution_named_kernels_is_refused(monkeypatch):
    def installed(_: str) -> object:
        return type("Distribution", (), {"version": "0.9"})()

    monkeypatch.setattr(preflight, "distribution", installed)
    with pytest.raises(LaunchError, match=r"pip uninstall kernels"):
        preflight.check_packages()


def test_without_that_distribution_nothing_is_said(monkeypatch):
    def missing(name: str) -> object:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(preflight, "distribution", missing)
    preflight.check_packages()


def test_systemd_is_told_through_its_socket(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
        pat_watchdog()
        assert manager.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_systemd("READY=1")


def test_a_watchdog_that_is_gone_or_does_not_read_holds_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    pat_watchdog()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        for _ in range(1000):
            pat_watchdog()


def test_a_model_file_that_may_not_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def refuse(path: Path, *_: object, **__: object) -> None:  # root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LaunchError, match=r"model.safetensors cannot be read \(Permission denied\)"):
        hash_model(tmp_path)
