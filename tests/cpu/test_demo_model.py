"""The real demo model: its greedy answers are those of the dense model, by transformers."""

from pathlib import Path

import msgspec
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from moeserve.model.cache import verify
from moeserve.model.demo import ensure_demo
from moeserve.model.demo_build import build_dense

ANSWERS = {
    "What is the capital of France? Answer in one sentence.": "The capital of France is Paris.",
    "Write a haiku about the sea.": "The waves of the sea, a silent beauty,\nA gentle lapping of the shore,\n"
    "A reminder of the",
    "Count from 1 to 10.": "1. 1\n2. 2\n3. 3\n4. 4\n5. 5",
}


def greedy(folder: Path, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """24 greedy tokens after each prompt, and the logits of the prompts, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts, scores = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            scores.append(model(ids).logits[0])
            texts.append(model.generate(ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist())
    return texts, scores


def test_greedy_answers_equal_the_dense_models(tmp_path: Path) -> None:
    demo = ensure_demo()
    verify(demo)
    build_dense(tmp_path / "dense")
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    config = msgspec.json.decode((demo / "tokenizer_config.json").read_bytes())
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    chats = [[{"role": "user", "content": question}] for question in ANSWERS]
    prompts = [tokenizer.encode(template.render(messages=c, add_generation_prompt=True)).ids for c in chats]
    dense_texts, dense_scores = greedy(tmp_path / "dense", prompts)
    texts, scores = greedy(demo, prompts)
    assert texts == dense_texts
    for mixture, dense in zip(scores, dense_scores, strict=True):
        torch.testing.assert_close(mixture, dense, rtol=0, atol=1e-3)
    assert [tokenizer.decode(text) for text in texts] == list(ANSWERS.values())
