"""A service whose model is computed by transformers' modelling code."""

import os
import signal
from pathlib import Path

from tests.support.gguf_export import in_blocks
from tests.support.gguf_modules import tiny, write_module_gguf
from tests.support.service import children_of, descendants, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = "It was the best of times, it was the worst of times; " * 3


def test_a_service_on_transformers_code_writes_the_text_of_our_own(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    body = {"model": "m", "prompt": list(PROMPT.encode()), "max_tokens": 16, "temperature": 0}
    arguments = ("--max-model-len", "512", "--max-num-batched-tokens", "64")
    with service(model, tmp_path / "native", "--model-impl", "native", *arguments) as running:
        expected = running.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert len(expected) > 8
    with service(model, tmp_path, "--model-impl", "transformers", *arguments) as running:
        answers = [running.http.post("/v1/completions", json=body).json() for _ in range(2)]
    for answer in answers:
        assert answer["choices"][0]["text"] == expected
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_gguf_file_on_transformers_code_is_served_from_its_blocks_and_goes_on_after_a_crash(tmp_path: Path) -> None:
    code = tiny("afmoe")
    code.outer.save_pretrained(tmp_path / "saved")
    write_module_gguf(tmp_path / "tiny.gguf", "afmoe", code, tmp_path / "saved", in_blocks)
    prompt, tokens = "&" * 40 + "$#", 400
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    settings = ("--max-model-len", "512", "--speculative-config", "none")
    with service(tmp_path / "tiny.gguf", tmp_path / "run", *settings) as running:
        told = running.http.get("/v1/models").json()["data"][0]["arithmetic"]
        answers = [running.http.post("/v1/completions", json=body).json() for _ in range(2)]
        events = running.stream(tokens, prompt=prompt, temperature=0, tells_resumed=True)
        begun = [next(events) for _ in range(3)]
        (engine,) = descendants(children_of(running.process.pid)["worker"])
        os.kill(engine, signal.SIGKILL)
        both = [*begun, *events]
    assert {"resumed": True} in both
    assert [event for event in both if "error" in event] == []
    pieces = [choice["text"] for event in both for choice in event.get("choices", ())]
    assert "".join(pieces) == answers[0]["choices"][0]["text"]
    assert told == "float32, weights q5_0, activations exact"
    assert answers[0]["usage"]["completion_tokens"] == tokens
    assert answers[1]["choices"][0]["text"] == answers[0]["choices"][0]["text"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
