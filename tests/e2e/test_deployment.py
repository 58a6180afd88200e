"""The files of `examples/` for operators say things that a service, systemd and nginx understand."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from moeserve.config import load_config
from tests.support.service import ROOT, Service, service, wait_until
from tests.support.tiny_checkpoint import MAX_POSITION, write_tiny_checkpoint

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), "--allowed-host", "llm.example") as running:
        yield running


def manifests(name: str) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / name).read_text())}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = (EXAMPLES / "moeserve.service").read_text()
    path = tmp_path / "moeserve.service"
    path.write_text(unit.replace("/opt/moeserve/.venv/bin/moeserve", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "moeserve" in line]) == (0, [])


@pytest.mark.parametrize("name", ["kubernetes/moeserve.yaml", "replicas/kubernetes.yaml"])
def test_containers_get_settings_that_are_there_and_volumes_that_exist(name: str) -> None:
    found = manifests(name)
    pod = found["Deployment"]["spec"]["template"]
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in pod["spec"]["containers"]:
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
        flags = [arg.removeprefix("--").partition("=") for arg in container["args"] if arg.startswith("--")]
        load_config({flag.replace("-", "_"): value for flag, _, value in flags}, {})


def test_probes_and_monitor_ask_for_routes_that_answer(running: Service) -> None:
    found = manifests("kubernetes/moeserve.yaml")
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    (endpoint,) = manifests("kubernetes/monitor.yaml")["ServiceMonitor"]["spec"]["endpoints"]
    assert found["Service"]["spec"]["ports"][0]["name"] == endpoint["port"]
    probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
    for path in (*probes, endpoint["path"]):
        assert running.http.get(path).status_code == 200


def test_alerts_go_by_metrics_and_labels_that_are_there(running: Service) -> None:
    # A rejection and an answer, so that their metrics have series.
    assert running.http.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2}).status_code == 200
    metrics = running.http.get("/metrics").text
    (group,) = yaml.safe_load((EXAMPLES / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        for metric in re.findall(r"moeserve_\w+", rule["expr"]):
            family = re.sub(r"_(total|bucket)$", "", metric)
            assert f"# TYPE {family} " in metrics or f"# TYPE {family}_total " in metrics, metric


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_a_stream_comes_through_nginx_as_it_is_made_and_ends_with_its_client(running: Service, tmp_path: Path) -> None:
    address = str(running.http.base_url).removeprefix("http://").rstrip("/")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    text = (EXAMPLES / "nginx.conf").read_text().replace("127.0.0.1:8000", address)
    text = re.sub(r"\s*ssl_certificate.*;", "", text).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    path = tmp_path / "nginx.conf"
    scratch = "\n".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy"))
    path.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
        f"http {{ access_log off; {scratch}\n{text} }}"
    )
    proxy = subprocess.Popen([shutil.which("nginx") or "", "-c", path, "-e", tmp_path / "error.log"])
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers={"host": "llm.example"}, timeout=60) as http:
            wait_until(lambda: answers(http))
            endless = {"max_tokens": MAX_POSITION // 2, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json={"model": "m", "prompt": "a", **endless}) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                # The first event is here while the service still makes the others.
                wait_until(lambda: num_running(running) == 1)
            wait_until(lambda: num_running(running) == 0)
    finally:
        proxy.terminate()
        proxy.wait(30)


def num_running(running: Service) -> float:
    found = re.search(r"^moeserve_requests_running(?:{.*})? (\S+)$", running.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False
