"""A service of a model with longrope writes what transformers `generate`s, within or beyond its original context."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.saved_models import generated, saved_model
from tests.support.service import Service, service
from tests.support.tiny_model import write_model_dir

ORIGINAL = 64
NUM_TOKENS = 24
# The longest context and prompts on both sides of the original context, the first and the last ones next to it.
SIDES = {
    "short": (ORIGINAL, (10, 20, 39, ORIGINAL - NUM_TOKENS)),
    "long": (ORIGINAL + 64, (ORIGINAL + 1, 80, 100)),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """phimoe with a configuration as it is published: `rope_scaling`, and the original context beside it."""
    folder = write_model_dir(tmp_path_factory.mktemp("model"))
    saved_model("phimoe-longrope", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    assert config["original_max_position_embeddings"] == ORIGINAL
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(config))
    return folder


def ask(running: Service, prompts: list[list[int]]) -> tuple[list[str], dict[str, Any]]:
    """The texts of greedy answers, and the usage."""
    body = {"model": "m", "prompt": prompts, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]], answer.json()["usage"]


@pytest.mark.parametrize("side", SIDES)
def test_text_is_that_of_transformers_on_the_side_of_the_context_that_is_served(
    model_dir: Path, tmp_path: Path, side: str
) -> None:
    max_model_len, lengths = SIDES[side]
    rng = random.Random(3)
    beginning = [rng.randrange(1, 128) for _ in range(max(lengths))]
    prompts = [beginning[:length] for length in lengths]
    # The tokens are bytes.
    expected = [bytes(tokens).decode() for tokens in generated(model_dir, prompts, NUM_TOKENS)]
    assert len(set(expected)) == len(lengths)
    with service(model_dir, tmp_path, "--block-size", "4", "--max-model-len", str(max_model_len)) as running:
        assert [ask(running, [prompt])[0][0] for prompt in prompts] == expected
        together, usage = ask(running, prompts)
        assert together == expected
        assert usage["prompt_tokens_details"]["cached_tokens"] > sum(lengths) // 2
