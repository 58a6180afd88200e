"""A service whose model is computed by transformers' modelling code."""

from pathlib import Path

from moeserve.config import ServeConfig
from moeserve.llm import LLM
from moeserve.plan import SamplingParams
from tests.support.service import service
from tests.support.tiny_checkpoint import write_tiny_checkpoint
from tests.support.tiny_model import byte_tokenizer

PROMPT = "It was the best of times, it was the worst of times; " * 3


def test_a_service_on_transformers_code_writes_the_text_of_our_own(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    native = LLM(model, ServeConfig(model_impl="native", kv_cache_memory=2**22, max_model_len=512))
    expected = native.generate([list(PROMPT.encode())], SamplingParams(max_tokens=16, temperature=0.0))[0].token_ids
    arguments = ("--model-impl", "transformers", "--max-model-len", "512", "--max-num-batched-tokens", "64")
    with service(model, tmp_path, *arguments) as running:
        body = {"model": "m", "prompt": list(PROMPT.encode()), "max_tokens": 16, "temperature": 0}
        answers = [running.http.post("/v1/completions", json=body).json() for _ in range(2)]
    for answer in answers:
        assert answer["choices"][0]["text"] == byte_tokenizer().decode(expected)
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
