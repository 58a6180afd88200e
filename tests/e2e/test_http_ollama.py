"""Ollama's API over real HTTP and a scripted engine: what strict clients read."""

from collections.abc import Iterator
from datetime import datetime

import pytest

from tests.support.frontend import Frontend, frontend


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("ollama")) as started:
        yield started


def test_the_version_is_high_enough_for_clients_that_compare_numbers(server: Frontend) -> None:
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("path", ["tags", "ps"])
def test_every_served_name_is_listed_with_the_fields_that_strict_clients_read(server: Frontend, path: str) -> None:
    models = server.http.get(f"/api/{path}").json()["models"]
    assert [model["name"] for model in models] == ["tiny", "alias"]
    for model in models:
        assert model["model"] == model["name"]
        assert model["size"] >= 0
        assert model["digest"]
        assert model["details"].keys() >= {"format", "family", "families", "parameter_size", "quantization_level"}
        for field in ("modified_at", "expires_at") if path == "ps" else ("modified_at",):
            assert datetime.fromisoformat(model[field]).tzinfo is not None


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny"}, {"model": "tiny:latest", "verbose": True}])
def test_a_model_is_described_under_its_name_with_and_without_latest(server: Frontend, body: dict[str, str]) -> None:
    shown = server.http.post("/api/show", json=body).json()
    facts = shown["model_info"]
    assert facts["general.basename"] == "tiny"
    assert facts[f"{facts['general.architecture']}.context_length"] == 512
    assert shown["details"]["family"] == facts["general.architecture"]
    assert shown["capabilities"][:2] == ["completion", "tools"]


def test_a_served_model_is_there_already_and_no_other_is_pulled(server: Frontend) -> None:
    assert server.http.post("/api/pull", json={"model": "tiny"}).text == '{"status":"success"}\n'
    refused = server.http.post("/api/pull", json={"model": "other"})
    assert refused.status_code == 400
    assert "`tiny` or `alias`" in refused.json()["error"]


@pytest.mark.parametrize(("body", "status"), [({"model": "other"}, 404), ({}, 400), ({"model": 3}, 400)])
def test_errors_are_a_sentence(server: Frontend, body: dict[str, object], status: int) -> None:
    answer = server.http.post("/api/show", json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert "model" in answer.json()["error"]
