"""A service whose model is computed by transformers' modelling code."""

from pathlib import Path

from tests.support.service import service
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
