"""MTP layers: what they draft is what transformers' modules compute over whole texts.

That drafts change no bits is tested in test_drafts.py.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.model.spec import CheckpointError
from moeserve.plan import Chunk, SamplingParams, StateUse, StepPlan
from moeserve.scheduling.steps import Runner
from tests.support.tiny_models import save
from tests.support.tiny_mtp import CASES, save_with_mtp

BASE = ServeConfig(kv_cache_memory=2**21, block_size=4, max_model_len=256, record_experts=False)


def with_mtp(count: int) -> ServeConfig:
    return replace(BASE, speculative_config=f'{{"method": "mtp", "num_speculative_tokens": {count}}}')


def open_runner(folder: Path, config: ServeConfig) -> Runner:
    return load_rank(folder, plan_model(folder, config), config, lambda _: None).start().runner


def run(runner: Runner, chunks: list[Chunk]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the drafts of each chunk of a step."""
    results = runner.launch(StepPlan(1, chunks)).result().chunks
    return [([token for token, _ in result.tokens], list(result.drafts)) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_mtp_layer_drafts_what_transformers_computes_over_the_whole_text(case: str, tmp_path: Path) -> None:
    oracle, random = save_with_mtp(case, tmp_path), Random(case)
    runner = open_runner(tmp_path, with_mtp(3))
    greedy = SamplingParams(max_tokens=99, temperature=0.0)
    tables = [array("i", range(16)), array("i", range(16, 40))]
    texts = [[random.randrange(128) for _ in range(random.randrange(6, 20))] for _ in tables]
    places = [0, 0]
    drafts: list[list[int]] = [[], []]
    for step in range(12):
        chunks = []
        for number, (text, table) in enumerate(zip(texts, tables, strict=True)):
            start = places[number]
            end = len(text) if step else random.randrange(1, len(text))
            guessed = drafts[number][: random.randrange(3)] if end == len(text) and step > 1 else []
            chunk = Chunk(
                str(number), array("i", text[start:end] + guessed), start, table, None, num_drafts=len(guessed)
            )
            if "qwen" in case:
                chunk.state = StateUse(number)
                # A state takes in right drafts alone here.
                del chunk.token_ids[end - start :]
                chunk.num_drafts = 0
            if end < len(text):
                chunk.following = text[end]
            else:
                chunk.sampling = greedy
            chunks.append(chunk)
        for number, (tokens, found) in enumerate(run(runner, chunks)):
            texts[number] += tokens
            places[number] = len(texts[number]) - 1 if tokens else chunks[number].start + len(chunks[number].token_ids)
            drafts[number] = found
            assert found == (oracle.predict(texts[number], 3) if tokens else [])


def test_a_checkpoint_without_such_a_layer_and_one_that_lacks_a_part_of_it_are_refused(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "none")
    with pytest.raises(CheckpointError, match="--speculative-config"):
        plan_model(tmp_path / "none", with_mtp(1))
    save_with_mtp("qwen3_next", tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    tensors = load_file(file)
    del tensors["mtp.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    plan_model(tmp_path / "part", BASE)
    with pytest.raises(CheckpointError, match=r"model\.mtp\.layers\.0\.self_attn\.q_proj\.weight"):
        plan_model(tmp_path / "part", with_mtp(1))


@pytest.mark.parametrize("changes", [{"model_impl": "transformers"}, {"device": "cuda"}])
def test_an_mtp_layer_is_refused_where_it_cannot_draft(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.engine.memory_plan.choose_device", lambda config, _: config.device)
    save_with_mtp("glm4_moe", tmp_path)
    with pytest.raises(ConfigError, match="MTP layers draft tokens"):
        plan_model(tmp_path, replace(with_mtp(1), **{"device": "cpu", **changes}))  # type: ignore[arg-type]
