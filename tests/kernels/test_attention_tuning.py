"""Measured configurations of attention: what is timed, what is written, what serving takes of it."""

import json
import math
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

import moeserve.model.gpu.kernels as attention_kernels
import moeserve.model.gpu.kernels as expert_kernels
import moeserve.tune.attention as tune_attention_module
from kernels.gpu.attention_config import (
    MAX_CANDIDATES,
    AttentionConfigs,
    AttentionShape,
    ExtendConfig,
    PrefillConfig,
    SplitConfig,
    extend_candidates,
    prefill_candidates,
    read_attention,
    split_candidates,
    write_attention,
)
from kernels.gpu.moe_config import Platform, TuningError, file_name
from moeserve.model.families import build_spec, load_config
from moeserve.model.gpu.batches import AttentionLimits
from moeserve.tune.attention import Batch, Batches, tune_attention
from tests.support.commands import invoke
from tests.support.tiny_models import save

pytestmark = pytest.mark.kernel_change

BF16 = torch.bfloat16
CPU = torch.device("cpu")
SHAPE = AttentionShape(32, 4, 128, 128, 64, BF16, BF16)
PLATFORM = Platform("NVIDIA H200", "3.6.0")
OWN = {
    "decode": (SplitConfig(16, 32, 8, 2), 7.04),
    "extend": (ExtendConfig(SplitConfig(32, 32, 4, 2), 12), 9.0),
    "prefill": (PrefillConfig(64, 32, 4, 2), 90.0),
}


def write(folder, shape=SHAPE, found=OWN):
    path = folder / file_name(SHAPE, PLATFORM)
    write_attention(path, shape, PLATFORM, found)
    return path


def entries(found):
    return ((kind, config, time) for kind, (config, time) in found.items())


def by_kind(found):
    return {kind: (config, time) for kind, config, time in found}


def test_a_file_is_read_back_and_serves_decodes_and_long_prompts(tmp_path):
    path = write(tmp_path)
    assert path.name == "attention-h32-kv4-k128-v128-b64-bfloat16-bfloat16--nvidia-h200--triton-3.6.json"
    assert json.loads(path.read_text())["configs"]["decode"]["microseconds"] == 7.0
    configs = AttentionConfigs.find(SHAPE, PLATFORM, (tmp_path / "missing", tmp_path))
    assert configs.split() == OWN["decode"][0] != SHAPE.split()
    assert configs.extend() == OWN["extend"][0] != SHAPE.extend()
    assert configs.prefill(1000) == OWN["prefill"][0] != SHAPE.prefill(1000)
    assert configs.prefill(64) == SHAPE.prefill(64)


def test_without_a_file_the_table_serves(tmp_path, caplog):
    configs = AttentionConfigs.find(SHAPE, PLATFORM, (tmp_path,))
    assert configs.split() == SHAPE.split()
    assert configs.extend() == SHAPE.extend()
    assert configs.prefill(1000) == SHAPE.prefill(1000)
    assert "moeserve tune" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decode": (SplitConfig(32, 32, 4, 2), 1.0)}, "cannot run"),
        ({"decode": (SplitConfig(16, 48, 4, 2), 1.0)}, "cannot run"),
        ({"prefill": (PrefillConfig(128, 256, 8, 5), 1.0)}, "cannot run"),
        ({"extend": (ExtendConfig(SplitConfig(24, 32, 4, 2), 8), 1.0)}, "cannot run"),
        ({"extend": (ExtendConfig(SplitConfig(32, 32, 4, 2), 65), 1.0)}, "cannot run"),
        ({"extend": (SplitConfig(32, 32, 4, 2), 1.0)}, "no file"),
        ({"decoding": (SplitConfig(16, 32, 4, 2), 1.0)}, "no file"),
    ],
)
def test_configurations_that_cannot_run_are_refused(tmp_path, change, message):
    with pytest.raises(TuningError, match=message):
        read_attention(write(tmp_path, found=change), SHAPE, PLATFORM)


def test_a_file_of_another_shape_is_refused(tmp_path):
    other = AttentionShape(32, 8, 128, 128, 64, BF16, BF16)
    with pytest.raises(TuningError, match="is for"):
        read_attention(write(tmp_path, shape=other), SHAPE, PLATFORM)


@pytest.mark.parametrize(
    ("shape", "tokens_per_tile", "max_query_len"),
    [
        (SHAPE, 8, 32),
        (AttentionShape(32, 8, 128, 128, 16, BF16, BF16), 16, 32),
        (AttentionShape(16, 16, 128, 128, 16, BF16, BF16), 16, 32),
        (AttentionShape(20, 4, 64, 64, 16, BF16, BF16), 12, 24),
        (AttentionShape(128, 1, 576, 512, 64, BF16, BF16), 1, 16),
        (AttentionShape(32, 4, 128, 128, 64, torch.float32, torch.float32), 2, 16),
        (AttentionShape(4, 4, 256, 256, 64, torch.float32, torch.float32), 16, 0),
    ],
)
def test_extends_are_packed_while_that_halves_the_rows(shape, tokens_per_tile, max_query_len):
    config = shape.extend()
    assert (config.tokens_per_tile(shape.group), config.max_query_len) == (tokens_per_tile, max_query_len)
    assert shape.fits(config.split)


@pytest.mark.parametrize(
    "shape", [SHAPE, AttentionShape(128, 1, 576, 512, 64, BF16, BF16), AttentionShape(8, 2, 64, 64, 16, BF16, BF16)]
)
def test_few_candidates_are_timed_and_all_of_them_fit(shape):
    extends = extend_candidates(shape)
    assert extends[0] == shape.extend()
    assert {config.max_query_len for config in extends} == {shape.extend().max_query_len}
    for candidates in (split_candidates(shape), [config.split for config in extends], prefill_candidates(shape)):
        assert 1 < len(candidates) <= MAX_CANDIDATES
        assert len(set(candidates)) == len(candidates)
        assert all(shape.fits(config) for config in candidates)
    assert split_candidates(shape)[0] == shape.split()
    assert prefill_candidates(shape)[0] == shape.prefill(65)


def three_candidates(monkeypatch):
    """Of each kind, on one set of keys and values."""
    monkeypatch.setattr("moeserve.tune.measure.COLD_BYTES", 1)
    for name in ("split_candidates", "extend_candidates", "prefill_candidates"):
        every = getattr(tune_attention_module, name)
        monkeypatch.setattr(tune_attention_module, name, lambda shape, every=every: every(shape)[:3])


SMALL = AttentionShape(4, 2, 32, 32, 16, BF16, BF16)
SMALL_BATCHES = Batches(Batch(2, 39, 1), Batch(2, 40, 3), Batch(1, 0, 20))


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, kv_dtype=torch.float8_e4m3fn)], ids=["bf16", "fp8"])
def test_the_tuner_keeps_the_fastest_of_all_that_it_timed(shape, device, monkeypatch):
    three_candidates(monkeypatch)
    outputs = []

    def time_us(calls):
        outputs.append(calls[0]().float().clone())
        return 100.0 - len(outputs)

    found = by_kind(tune_attention(shape, device, 4, time_us=time_us, batches=SMALL_BATCHES))
    # Three of each kind, and an extend of two tokens both ways, of which the latter was the faster.
    assert len(outputs) == 11
    assert found["decode"] == (split_candidates(shape)[2], 97.0)
    assert found["extend"] == (replace(extend_candidates(shape)[2], max_query_len=0), 94.0)
    assert found["prefill"] == (prefill_candidates(shape)[2], 89.0)
    # All candidates compute the same attention, and so do packing and prefill.
    for same in (outputs[:3], outputs[3:6], outputs[6:8], outputs[8:]):
        for other in same[1:]:
            torch.testing.assert_close(other, same[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("prefill_us", "longest"), [(5.0, 0), (20.0, 8), (1000.0, 64)])
def test_extends_are_packed_up_to_where_a_prefill_was_faster(prefill_us, longest, monkeypatch):
    """With times of one microsecond per token of each sequence, and one time for every prefill."""

    class Prepared:
        def __init__(self, case):
            self.case, self.num_sets = case, 1

        def relative_error(self, index):
            return 1e-3

        def run(self, index):
            return prefill_us if self.case.kind == "prefill" else 2.0 * self.case.query_lens[0] + 2

    three_candidates(monkeypatch)
    monkeypatch.setattr(tune_attention_module, "prepare", lambda case, *args, **options: Prepared(case))
    found = by_kind(tune_attention(SMALL, CPU, 4, time_us=lambda calls: calls[0](), batches=SMALL_BATCHES))
    config, time = found["extend"]
    assert (config.max_query_len, time) == (longest, 8.0)


def test_what_the_table_does_not_pack_is_not_tuned(monkeypatch):
    three_candidates(monkeypatch)
    shape = AttentionShape(4, 4, 256, 256, 64, torch.float32, torch.float32)
    right = types.SimpleNamespace(num_sets=2, run=abs, relative_error=lambda index: 1e-3)
    monkeypatch.setattr(tune_attention_module, "random_tensors", lambda case, device: None)
    monkeypatch.setattr(tune_attention_module, "prepare", lambda *args, **options: right)
    found = by_kind(tune_attention(shape, CPU, 4, time_us=len))
    assert found.keys() == {"decode", "prefill"}
    assert found["decode"][1] == 2, "as many calls as there are sets"


def test_candidates_that_do_not_run_or_are_wrong_are_passed_over(monkeypatch):
    three_candidates(monkeypatch)
    own, lines = split_candidates(SMALL)[:3], []

    def prepare(case, *args, config, tensors):
        if config == own[0]:
            raise OutOfResources(1, 2, "shared memory")
        wrong = math.nan if config == own[1] else 1e-3
        return types.SimpleNamespace(num_sets=1, run=abs, relative_error=lambda index: wrong)

    monkeypatch.setattr(tune_attention_module, "random_tensors", lambda case, device: None)
    monkeypatch.setattr(tune_attention_module, "prepare", prepare)
    times = iter((1.0, 2.0))
    found = tune_attention(SMALL, CPU, 4, time_us=lambda calls: next(times), report=lines.append)
    assert next(found) == ("decode", own[2], 2.0)
    assert lines[0] == f"skipped {own[0]}: OutOfResources"
    assert lines[1].startswith(f"WRONG: {own[1]}, relative error nan")


def test_a_file_without_extends_leaves_them_to_the_table(tmp_path):
    """As files were before extends were tuned."""
    path = write(tmp_path, found={"decode": OWN["decode"], "prefill": OWN["prefill"]})
    configs = AttentionConfigs(SHAPE, read_attention(path, SHAPE, PLATFORM))
    assert configs.split() == OWN["decode"][0]
    assert configs.extend() == SHAPE.extend()


def test_keys_and_values_of_another_width_have_a_file_of_their_own(tmp_path):
    write(tmp_path)
    fp8 = replace(SHAPE, kv_dtype=torch.float8_e4m3fn)
    assert file_name(fp8, PLATFORM) != file_name(SHAPE, PLATFORM)
    assert AttentionConfigs.find(fp8, PLATFORM, (tmp_path,)).split() == fp8.split()
    with pytest.raises(TuningError, match="float8_e4m3fn"):
        read_attention(tmp_path / file_name(SHAPE, PLATFORM), fp8, PLATFORM)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_the_command_writes_where_serving_looks(kv_cache_dtype, monkeypatch, tmp_path):
    pytest.importorskip("msgspec", reason="finding a model by name needs the whole service")
    save("llama", tmp_path / "model")
    platform = expert_kernels.platform_of(CPU)
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    monkeypatch.setattr("moeserve.model.source.resolve_model", Path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"multi_processor_count": 132}))
    monkeypatch.setattr(expert_kernels, "platform_of", lambda device: platform)
    monkeypatch.setattr(attention_kernels, "platform_of", lambda device: platform)
    own = {
        "decode": (SplitConfig(16, 16, 8, 2), 7.0),
        "extend": (ExtendConfig(SplitConfig(32, 16, 4, 2), 8), 9.0),
        "prefill": (PrefillConfig(64, 16, 4, 2), 90.0),
    }
    monkeypatch.setattr(tune_attention_module, "tune_attention", lambda *args, **options: entries(own))
    result = invoke("tune", str(tmp_path / "model"), "--block-size", "16", "--kv-cache-dtype", kv_cache_dtype)
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "tuned").iterdir()
    assert result.output == f"Wrote {path}\nA llama model has no experts to tune.\n"
    spec = build_spec(load_config(tmp_path / "model"))
    kv_dtype = attention_kernels.kv_dtype_of(kv_cache_dtype)
    tuned = attention_kernels.tuned_attention(attention_kernels.attention_shape(spec, 16, BF16, kv_dtype), CPU)
    limits = AttentionLimits(spec, 16, 64, BF16, CPU, tuned, kv_dtype)
    assert limits.prefill(100) == own["prefill"][0]
    assert {work.config for work in limits.works(2).values()} == {own["decode"][0]}
    assert {work.config for work in limits.extend_works(2).values()} == {own["extend"][0].split}
    assert limits.extends(2).max_query_len == 8


def test_fp8_keys_under_float32_are_refused_in_one_sentence(monkeypatch, tmp_path):
    pytest.importorskip("msgspec", reason="finding a model by name needs the whole service")
    save("llama", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = invoke("tune", str(tmp_path), "--weights", "float32", "--kv-cache-dtype", "fp8_e4m3")
    assert result.exit_code == 1
    assert result.output == "Error: Nothing is served in float32 over keys and values in fp8_e4m3.\n"


def test_a_block_size_that_is_no_power_of_two_is_one_sentence(monkeypatch, tmp_path):
    pytest.importorskip("msgspec", reason="finding a model by name needs the whole service")
    save("llama", tmp_path)
    monkeypatch.setattr("moeserve.model.source.resolve_model", Path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = invoke("tune", str(tmp_path), "--block-size", "24")
    assert result.exit_code == 2
    assert "not a power of two" in result.output
