"""The examples fit the code they are examples of."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import yaml

from launcher.serve import serve
from moeserve.config import ServeConfig, load_config
from moeserve.settings.kv_events import parse_kv_events

ROOT = Path(__file__).resolve().parents[2]


def test_the_dashboard_asks_for_metrics_that_are_exported():
    dashboard = json.loads((ROOT / "examples" / "grafana" / "moeserve.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = set(re.findall(r"moeserve_\w+", " ".join(expressions)))
    folder = ROOT / "moeserve" / "frontend"
    source = "".join((folder / name).read_text() for name in ("metrics.py",))
    exported = set(re.findall(r'"moeserve_(\w+)"', source)) | set(re.findall(r'\("(\w+)", "', source))
    exported |= set(re.findall(r'^    "(\w+)": \(', source, re.MULTILINE))
    names = {re.sub(r"_(total|bucket)$", "", name.removeprefix("moeserve_")) for name in asked}
    assert names
    assert names <= exported


def test_the_image_copies_every_package():
    dockerfile = (ROOT / "examples" / "Dockerfile").read_text()
    for package in ("launcher", "moeserve", "radix_cache", "experts", "kernels"):
        assert f"COPY {package} {package}\n" in dockerfile


def test_the_watchdog_is_slower_than_the_supervisors_own():
    unit = (ROOT / "examples" / "moeserve.service").read_text()
    assert int(re.search(r"WatchdogSec=(\d+)", unit)[1]) > ServeConfig.engine_timeout + 5
    assert "Type=notify" in unit


def test_a_start_that_fails_again_and_again_is_not_repeated_for_ever():
    unit = (ROOT / "examples" / "moeserve.service").read_text()
    seconds, starts, pause = (
        int(re.search(rf"{name}=(\d+)", unit)[1]) for name in ("StartLimitIntervalSec", "StartLimitBurst", "RestartSec")
    )
    # A start that fails takes some seconds, and as many as the burst have to fall into the interval.
    assert starts * (pause + 15) < seconds
    assert "RestartPreventExitStatus=2\n" in unit


def test_the_containers_health_check_is_a_shell_script_that_runs(tmp_path):
    compose = (ROOT / "examples" / "compose.yaml").read_text()
    script = " ".join(compose.partition(">-\n")[2].partition("\n\n")[0].split()).replace("$$", "$")
    (tmp_path / "bin").mkdir()
    for name, body in (("python", 'exit "$(cat status)"'), ("kill", "echo $@ > killed")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    # `kill` is built into the shell.
    script = script.replace("/dev/shm/", "").replace("kill -KILL", "./bin/kill -KILL")

    def check(status: int) -> int:
        (tmp_path / "status").write_text(str(status))
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        return subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment, check=False).returncode

    killed = tmp_path / "killed"
    assert [check(status) for status in (1, 1, 1, 1, 0, 1, 1, 0, 1, 1)] == [1, 1, 1, 1, 0, 1, 1, 0, 1, 1]
    assert not killed.exists()
    assert check(1) == 1
    assert killed.read_text() == "-KILL -1\n"


def test_stops_are_given_longer_than_a_drain_takes():
    unit = (ROOT / "examples" / "moeserve.service").read_text()
    seconds = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])
    assert seconds > 30 + 5


REPLICAS = ROOT / "examples" / "replicas"


def replica_commands() -> list[list[str]]:
    """Return the arguments of `moeserve serve` in the units, of numbers 0 and 1, and in the containers."""
    unit = (REPLICAS / "moeserve-replica@.service").read_text().replace("\\\n", " ")
    line = re.search(r"^ExecStart=\S+/moeserve serve (.*)$", unit, re.MULTILINE)[1]
    pod = next(yaml.safe_load_all((REPLICAS / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"]
    containers = [one["args"] for one in pod["containers"] if one["name"].startswith("replica")]
    assert all(arguments[0] == "serve" for arguments in containers)
    return [
        *(shlex.split(line.replace("%i", number)) for number in "01"),
        *(arguments[1:] for arguments in containers),
    ]


def test_replicas_share_a_store_and_have_ports_of_their_own():
    found = []
    for arguments in replica_commands():
        flags = serve.make_context("serve", list(arguments)).params
        config = load_config({name: value for name, value in flags.items() if name != "config_file"}, {}, None)
        events = parse_kv_events(config.kv_events_config)
        assert events.is_on
        assert events.is_local
        found.append((config.port, events.endpoint, events.replay_endpoint, config.response_store, config.kv_disk_path))
    for first, second in (found[:2], found[2:]):
        assert not set(first[:3]) & set(second[:3])
        assert first[3:] == second[3:]
        ports = [port for one in (first, second) for port in (one[0], *(end.rpartition(":")[2] for end in one[1:3]))]
        assert len(set(map(int, ports))) == 6


def test_the_routers_of_the_examples_ask_the_replicas():
    ports = [8000, 8001]
    for name in ("vllm-router.service", "kubernetes.yaml"):
        text = (REPLICAS / name).read_text()
        assert [int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)(?=\s)", text)] == ports
        assert "--policy kv_aware" in text
