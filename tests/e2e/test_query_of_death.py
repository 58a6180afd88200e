"""A request whose step fails ends alone also where the step cannot be computed again in parts: the engine dies of it
twice, and every other request goes on to the answer that it would have had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.crash_traffic import KINDS, Traffic, errors_in
from tests.support.kills import assert_whole, processes_of
from tests.support.saved_models import saved_model
from tests.support.service import ROOT, Service, children_of, descendants, is_ready, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import SPECIALS, TEMPLATE, write_model_dir

# Python runs this before any program: some requests fail at their tenth token as by a bug of the sampler.
FAULT = """
from moeserve.model import sampler

def faulty(chunk, draw_of=getattr(sampler, "sound", sampler._draw_of)):
    if chunk.sampling.top_k == 13 and chunk.start > LONG:
        raise ValueError("no such top_k")
    return draw_of(chunk)

sampler.sound, sampler._draw_of = getattr(sampler, "sound", sampler._draw_of), faulty
"""
PATH, BODY = KINDS["sampled stream"]
INNOCENT = {name: KINDS[name] for name in ("greedy", "sampled stream", "several choices", "schema")}
PROMPT = [7] * 40


# As by a bug of a kernel.
CRASH = FAULT.replace('raise ValueError("no such top_k")', "import os; os.abort()")


@pytest.fixture(params=["recurrent layers", "two ranks"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fault")
    (folder / "sitecustomize.py").write_text(FAULT.replace("LONG", str(len(PROMPT) + 10)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    model = tmp_path_factory.mktemp("m")
    if request.param == "two ranks":
        write_tiny_checkpoint(model)
        settings = ["--expert-parallel-size", "2", "--engine-timeout", "6"]
    else:
        write_model_dir(model, TEMPLATE, SPECIALS)
        saved_model("qwen3_5_moe_text", model, vocab_size=256 + len(SPECIALS), max_position_embeddings=2048)
        settings = []
    with service(model, tmp_path_factory.mktemp("s"), *settings) as started:
        yield started


@pytest.fixture
def crashing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service with two HTTP processes and keys, in which some requests end the process itself."""
    folder, settings = tmp_path_factory.mktemp("fault"), tmp_path_factory.mktemp("keys")
    (folder / "sitecustomize.py").write_text(CRASH.replace("LONG", str(len(PROMPT) + 10)))
    (settings / "keys").write_text("user:one\nuser:narrow running=0.01\nadmin:operator\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    keys = ("--api-key-file", str(settings / "keys"), "--num-frontends", "2", "--max-restarts", "100")
    with service(model, tmp_path_factory.mktemp("s"), *keys) as started:
        started.http.headers["Authorization"] = "Bearer operator"
        yield started


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        pytest.param("one", {"priority": 5}, id="low priority"),
        pytest.param("one", {}, id="plain", marks=pytest.mark.long),
        pytest.param("narrow", {}, id="a key with one place", marks=pytest.mark.long),
        pytest.param("one", {"n": 4}, id="four choices", marks=pytest.mark.long),
        pytest.param("operator", {"background": True}, id="in the background", marks=pytest.mark.long),
    ],
)
def test_a_request_that_kills_the_process_costs_two_lives_and_no_other_request(
    crashing: Service, key: str, fields: dict[str, object]
) -> None:
    url = str(crashing.http.base_url)
    undisturbed = Traffic(url, INNOCENT, key="one").start().wait()
    crashing.http.post("/reset_prefix_cache")
    # Twice, so that both HTTP processes have some.
    others = [Traffic(url, INNOCENT, key="one").start() for _ in range(2)]
    assert all(traffic.started.wait(60) for traffic in others)
    body = {**BODY, "prompt": PROMPT, "top_k": 13, **fields}
    [ended] = Traffic(url, {"poison": (PATH, body)}, key=key).start().wait().values()
    [error] = errors_in(ended)
    assert error["code"] == "engine_crash"
    for traffic in others:
        assert traffic.wait() == undisturbed
    # Whichever process it comes to.
    for _ in range(6):
        [again] = Traffic(url, {"again": (PATH, body)}, key=key).start().wait().values()
        assert (again.status, errors_in(again)[0]["code"]) == (500, "engine_crash")
    wait_until(lambda: "moeserve_engine_restarts_total 2.0" in crashing.http.get("/metrics").text)


@pytest.mark.long
def test_a_client_that_leaves_after_each_death_and_sends_it_again_ends_no_more_engines(crashing: Service) -> None:
    crashing.http.headers["Authorization"] = "Bearer one"
    body = {**BODY, "model": "m", "prompt": PROMPT, "top_k": 13, "stream": True}
    for _ in range(4):
        wait_until(lambda: is_ready(crashing))
        engines = descendants(children_of(crashing.process.pid)["worker"])
        with crashing.http.stream("POST", PATH, json=body) as answer:
            if answer.status_code != 200:
                break
            wait_until(lambda: not all(Path(f"/proc/{pid}").exists() for pid in engines))  # noqa: B023
    answer = crashing.http.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crash")
    crashing.http.headers["Authorization"] = "Bearer operator"
    assert "moeserve_engine_restarts_total 2.0" in crashing.http.get("/metrics").text


@pytest.mark.long
def test_the_request_at_fault_ends_alone(running: Service) -> None:
    url = str(running.http.base_url)
    undisturbed = Traffic(url, INNOCENT).start().wait()
    running.http.post("/reset_prefix_cache")
    seen = processes_of(running)
    poison = {"poison": (PATH, {**BODY, "prompt": PROMPT, "top_k": 13})}
    others = Traffic(url, INNOCENT).start()
    assert others.started.wait(60)
    [ended] = Traffic(url, poison).start().wait().values()
    [error] = errors_in(ended)
    assert "2 times" in error["message"]
    assert others.wait() == undisturbed
    assert_whole(running, seen)


@pytest.mark.long
def test_clients_that_send_it_again_end_no_more_engines(running: Service) -> None:
    """The openai package tries three times by default. That would be six deaths, one more than end the service."""
    client = openai.OpenAI(base_url=f"{running.http.base_url}/v1", api_key="none")
    seen = processes_of(running)
    for reason in ("2 times", "before"):
        with pytest.raises(openai.InternalServerError, match=reason) as failure:
            client.completions.create(model="m", prompt=PROMPT, max_tokens=50, extra_body={"top_k": 13})
        assert failure.value.code == "engine_crash"
        assert_whole(running, seen)
    assert "moeserve_engine_restarts_total 2.0" in running.http.get("/metrics").text
