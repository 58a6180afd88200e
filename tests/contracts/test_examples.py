"""The examples fit the code they are examples of."""

import json
import re
from pathlib import Path

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


def test_stops_are_given_longer_than_a_drain_takes():
    unit = (ROOT / "examples" / "moeserve.service").read_text()
    seconds = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])
    assert seconds > 30 + 5
