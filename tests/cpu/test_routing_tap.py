"""A tap observes every choice of the gates and changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.token_engine import TokenEngine
from experts.routing.choices import RoutingShape, unpack
from experts.routing.tap import RoutingTap
from kernels.moe_gate import GateSpec, select_experts
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.experts.observe import ExpertRecording, plan_recording
from moeserve.engine.memory_plan import plan_model
from moeserve.plan import SamplingParams
from moeserve.scheduling.steps import LocalExecutor, Steps
from tests.support.checkpoints import TOKENS, load, logits_of, spec_of
from tests.support.tiny_models import save

CONFIG = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=160, max_num_batched_tokens=8, max_num_seqs=4)


@pytest.mark.parametrize("case", ["mixtral", "glm4_moe", "qwen2_moe"])
def test_logits_keep_their_bits_and_all_choices_are_heard(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    spec = spec_of(tmp_path)
    moe = spec.moe
    assert moe is not None
    tap = RoutingTap(len(spec.moe_layers), moe.num_experts)
    assert torch.equal(logits_of(load(tmp_path, observers=[tap])), logits_of(load(tmp_path)))
    top_k = moe.gate.top_k
    heard = np.frombuffer(bytes(tap.take()), np.uint8)
    assert len(heard) == len(spec.moe_layers) * len(TOKENS) * top_k
    assert bytes(tap.take()) == b""
    assert len({tuple(sorted(row)) for row in heard.reshape(-1, top_k).tolist()}) > 1
    assert all(len(set(row)) == top_k and max(row) < moe.num_experts for row in heard.reshape(-1, top_k).tolist())


def test_a_tap_hears_the_ids_that_the_gate_gave() -> None:
    logits = torch.randn(5, 300)
    ids, _ = select_experts(logits, GateSpec(4, renormalise=True))
    tap = RoutingTap(1, 300)
    tap.chose(0, ids)
    shape = RoutingShape(1, 300, 4, last_is_sparse=False)
    np.testing.assert_array_equal(unpack(bytes(tap.take()), shape, 5, [])[0], ids.numpy())
    tap.chose_all(ids[1:])
    tap.chose_all(ids)
    tap.clear()
    tap.chose_all(ids)
    np.testing.assert_array_equal(unpack(bytes(tap.take()), shape, 5, [])[0], ids.numpy())


def test_an_engine_that_records_gives_the_same_tokens_and_counts_every_row(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    prompts = [[5 * n + i for i in range(9 + n)] for n in range(4)]
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    expected = [completion.token_ids for completion in TokenEngine(tmp_path, CONFIG).generate(prompts, sampling)]

    plan = plan_model(tmp_path, CONFIG)
    planned = plan_recording(CONFIG, tmp_path, plan.spec)
    assert planned is not None
    rank = load_rank(tmp_path, plan, CONFIG, lambda _: None).start()
    recording = ExpertRecording(planned)
    heard = TokenEngine(tmp_path, CONFIG)
    heard.steps = Steps(heard.scheduler, LocalExecutor(rank.runner), depth=0, observers=[recording])
    assert [completion.token_ids for completion in heard.generate(prompts, sampling)] == expected
    num_rows = sum(map(len, prompts)) + 4 * 5
    load_of = recording.statistics().load().sum(axis=1) / 2
    assert recording.recorder.num_tokens == num_rows
    assert load_of[:-1] == pytest.approx([num_rows] * 2, rel=1e-2)
    assert load_of[-1] == pytest.approx(4 * 6, rel=1e-2)
