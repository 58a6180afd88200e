"""The manifests of `examples/` against Kubernetes' own schemas: `make test-routers`."""

from __future__ import annotations

import subprocess

import pytest

from tests.clients.environments import Client, cache_folder, ensure_environment
from tests.support.service import ROOT

VALIDATOR = Client("kubernetes-validate", "kubernetes-validate", "pip", ("kubernetes-validate==1.37.0",), "")
# It installs packages, so only `make test-routers` runs it.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["kubernetes/moeserve.yaml", "replicas/kubernetes.yaml"])
def test_kubernetes_knows_every_field_of_a_manifest(name: str) -> None:
    program = ensure_environment(VALIDATOR, cache_folder()).programs / "kubernetes-validate"
    done = subprocess.run([program, "--strict", ROOT / "examples" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
