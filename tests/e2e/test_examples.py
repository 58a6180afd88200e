"""The programs of `examples/` run over a service, and say what their texts promise."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.support.agent_templates import FAMILIES
from tests.support.service import ROOT, Service, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES["chatml"]
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), family.template, family.specials)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("service"), "--max-model-len", "8192") as running:
        yield running


def run(running: Service, name: str, given: str = "") -> str:
    """What a program of the examples prints over a service."""
    environment = {"OPENAI_BASE_URL": f"{running.http.base_url}/v1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env={**os.environ, **environment},
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_chat_tells_how_much_of_each_turn_was_cached(running: Service) -> None:
    said = run(running, "chat.py", "hello\nand then?\n\n")
    (first, first_prompt), (second, second_prompt) = re.findall(r"(\d+) of (\d+) prompt tokens cached", said)
    assert int(first) < int(first_prompt) < int(second_prompt)
    assert int(second) >= int(first_prompt) - 16


def test_agents_compute_their_shared_prompt_once(running: Service) -> None:
    said = run(running, "agents_shared_prompt.py")
    together, again = said.split("once more")
    shares = [[int(a) / int(b) for a, b in re.findall(r"(\d+) of (\d+)", part)] for part in (together, again)]
    assert sorted(shares[0])[0] < 0.5
    assert all(share > 0.9 for share in sorted(shares[0])[1:])
    assert all(share > 0.95 for share in shares[1])


def test_the_tool_is_called_with_arguments_of_its_schema(running: Service) -> None:
    assert re.search(
        r'get_weather\(\{"city": "(Paris|Rome)", ?"days": [12]\}\) -> (Paris|Rome): sun', run(running, "tools.py")
    )


def test_the_structured_answer_is_an_object_of_its_class(running: Service) -> None:
    assert re.fullmatch(
        r"kind='(bug|question|wish)' urgent=(True|False) component='\w+'\n", run(running, "structured.py")
    )


def test_a_script_answers_prompts_without_a_server(model: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "MOESERVE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "offline.py", model], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^'.*' -> '.*'$", done.stdout, re.MULTILINE)) == 3


def test_the_first_programs_of_the_readme_run_as_they_stand(model: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (curl,) = re.findall(r"^```\n(curl .*?)^```$", readme, re.DOTALL | re.MULTILINE)
    with_openai, with_llm = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    with service(model, tmp_path, "--served-model-name", "demo", "--default-max-tokens", "40") as running:
        url = str(running.http.base_url).rstrip("/")
        here = [text.replace("http://127.0.0.1:8000", url) for text in (curl, with_openai)]
        asked = subprocess.run(["bash", "-c", here[0]], capture_output=True, text=True, timeout=240)
        assert asked.stdout.startswith("data: ")
        assert "data: [DONE]" in asked.stdout
        asked = subprocess.run([sys.executable, "-c", here[1]], capture_output=True, text=True, timeout=240)
        assert (asked.returncode, "cached prompt tokens:" in asked.stdout) == (0, True), asked.stderr
    script = with_llm.replace("/path/to/model", str(model))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "MOESERVE_THREADS": "1"}
    asked = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert (asked.returncode, asked.stdout.strip() != "") == (0, True), asked.stderr


def test_torchrun_serves_over_two_ranks(model: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    settings = ("--port", "0", "--kv-cache-memory", "64MiB")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    with said.open("w") as file:
        process = subprocess.Popen(
            [EXAMPLES / "torchrun_two_ranks.sh", model, *settings], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    try:
        wait_until(lambda: process.poll() is not None or "ready on" in said.read_text(), timeout=240)
        found = re.search(r"ready on (http://\S+)", said.read_text())
        assert found is not None, said.read_text()
        with httpx2.Client(base_url=found[1], timeout=60) as http:
            name = http.get("/v1/models").json()["data"][0]["id"]
            answer = http.post("/v1/completions", json={"model": name, "prompt": "hi", "max_tokens": 3})
        assert answer.status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_two_nodes_need_the_address_of_the_first() -> None:
    done = subprocess.run([EXAMPLES / "torchrun_two_nodes.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "address of node 0" in done.stderr
