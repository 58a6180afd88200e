"""Decisions for a GPU that need none: sizes of decode batches, arrays of a step, memory for KV, the device."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from launcher.gpu_table import all_gpus, gpu_of, with_step_budget
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import choose_device, incapability, kv_memory, step_budget, too_few_gpus
from moeserve.model.step_arrays import ExtendLimits, capture_sizes, padded_size, share_prompts, step_arrays
from moeserve.plan import Chunk, SamplingParams

GIB = 2**30


def test_captured_sizes_grow_by_eights_then_sixteens_and_end_with_the_largest() -> None:
    assert capture_sizes(1) == (1,)
    assert capture_sizes(3) == (1, 2, 3)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(256)[-3:] == (240, 248, 256)
    assert capture_sizes(300)[-4:] == (256, 272, 288, 300)


def test_a_batch_is_padded_to_the_next_size() -> None:
    sizes = capture_sizes(20)
    assert [padded_size(count, sizes) for count in (1, 3, 5, 17, 20)] == [1, 4, 8, 20, 20]
    assert padded_size(21, sizes) is None
    assert padded_size(0, sizes) is None


def test_arrays_of_decodes_and_a_prompt() -> None:
    chunks = [
        Chunk("a", array("i", [0]), 5, array("i", [7, 2, 9]), SamplingParams(1), None, 1),
        Chunk("b", array("i", [11]), 0, array("i", [3]), SamplingParams(1)),
        Chunk("c", array("i", [21, 22, 23]), 3, array("i", [6, 5]), None),
    ]
    arrays = step_arrays(chunks, 4)
    assert arrays.token_ids.tolist() == [0, 11, 21, 22, 23]
    assert arrays.sources.tolist() == [1, -1, -1, -1, -1]
    assert arrays.positions.tolist() == [5, 0, 3, 4, 5]
    assert arrays.slots.tolist() == [9, 12, 27, 20, 21]
    assert arrays.seq_lens.tolist() == [6, 1, 6]
    assert arrays.query_starts.tolist() == [0, 1, 2, 5]
    assert [table.tolist() for table in arrays.block_tables] == [[7, 2], [3], [6, 5]]
    assert (arrays.num_decodes, arrays.max_query_len, arrays.prompt_lens) == (2, 3, [3])


def test_one_token_of_a_prompt_behind_a_longer_chunk_is_no_decode() -> None:
    chunks = [
        Chunk("a", array("i", [1, 2]), 0, array("i", [0]), None),
        Chunk("b", array("i", [1]), 0, array("i", [1]), None),
    ]
    arrays = step_arrays(chunks, 4)
    assert arrays.num_decodes == 0
    assert not arrays.sources


@pytest.mark.parametrize(
    ("prompt_lens", "run", "longest"),
    [
        ([], None, 0),
        ([100], None, 100),
        ([8], (0, 1), 0),
        ([9], None, 9),
        ([1, 8, 3], (0, 3), 0),
        ([100, 8, 3], (1, 3), 100),
        ([3, 100, 8, 3, 9], (2, 4), 100),
        ([3, 3, 100, 8, 3], (0, 2), 100),
        # Twelve tiles of four tokens are the most of a step.
        ([8] * 7, (0, 6), 8),
        ([1] * 20, (0, 12), 1),
        ([8] * 5 + [1] * 12, (5, 17), 8),
    ],
)
def test_the_most_neighbouring_short_prompts_are_packed(prompt_lens, run, longest) -> None:
    assert share_prompts(prompt_lens, ExtendLimits(8, 4, 12)) == (run, longest)
    assert share_prompts(prompt_lens, None) == (None, max(prompt_lens, default=0))


def test_kv_gets_what_others_weights_steps_and_graphs_leave() -> None:
    numbers = {"total_bytes": 100 * GIB, "free_bytes": 60 * GIB, "reserved_bytes": 35 * GIB, "peak_bytes": 34 * GIB}
    assert kv_memory(**numbers, utilization=0.9, graph_bytes=0) == (90 - 5 - 34) * GIB
    assert kv_memory(**numbers, utilization=0.9, graph_bytes=GIB) == (90 - 5 - 35) * GIB
    assert kv_memory(**numbers, utilization=0.3, graph_bytes=GIB) == 0


def test_a_gpu_is_used_only_where_it_is_asked_for() -> None:
    assert choose_device(ServeConfig(device="cuda"), lambda _: None) == "cuda"
    assert choose_device(ServeConfig(), lambda _: None) == "cpu"
    assert choose_device(ServeConfig(device="cpu"), lambda _: None) == "cpu"


@pytest.mark.parametrize(
    ("settings", "absence", "reason"),
    [
        ({}, "torch finds no CUDA device", "no CUDA device"),
        ({"block_size": 24}, None, "power of two"),
        ({"quantization": "experts=int8", "dtype": "float32"}, None, "--quantization is for 16 bits"),
        ({"quantization": "int8"}, None, "--quantization int8 is for a CPU; a GPU rounds experts alone"),
        ({"quantization": "int8,experts=fp8"}, None, "a GPU rounds experts alone, as experts=int4"),
        ({"arithmetic": "int8"}, None, "--arithmetic int8 is for a CPU"),
        ({"kv_cache_dtype": "fp8_e4m3", "dtype": "float32"}, None, "--kv-cache-dtype is for 16 bits"),
        ({"kv_cache_dtype": "int8"}, None, "--kv-cache-dtype int8 is for a CPU"),
        ({"reproducible": True}, None, "--reproducible is for a CPU"),
    ],
)
def test_a_gpu_asked_for_by_name_that_cannot_serve_is_refused(
    settings: dict[str, object], absence: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_device(ServeConfig(device="cuda", **settings), lambda _: absence)


def test_fp8_takes_a_newer_gpu_than_16_bits_do() -> None:
    asked: list[bool] = []
    for settings in ({"quantization": "experts=int8"}, {"quantization": "experts=fp8"}, {"kv_cache_dtype": "fp8_e4m3"}):
        choose_device(ServeConfig(device="cuda", **settings), asked.append)
    assert asked == [False, True, True]
    assert incapability((7, 5), False) == "compute capability 7.5 is below 8.0"
    assert incapability((8, 6), False) is None
    assert "8.6 is below 8.9" in (incapability((8, 6), True) or "")
    assert incapability((8, 9), True) is None


def test_every_rank_of_a_machine_needs_a_gpu() -> None:
    config = ServeConfig(device="cuda", expert_parallel_size=8, nnodes=2)
    assert choose_device(config, lambda _: None) == "cuda"
    assert too_few_gpus(config, 4) is None
    assert all(count in (too_few_gpus(config, 3) or "") for count in ("4 ranks", "finds 3"))


def test_steps_on_a_gpu_are_larger_unless_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.device.computes_in_tiles", lambda: False)
    assert (step_budget(ServeConfig()), step_budget(ServeConfig(), "cuda")) == (256, 4096)
    assert step_budget(ServeConfig(max_num_batched_tokens=100), "cuda") == 100


def test_products_of_a_gpus_largest_step_take_a_few_times_as_long_as_reading_its_weights() -> None:
    config = ServeConfig(device="cuda")
    assert {gpu.name: step_budget(config, "cuda", gpu) for gpu in all_gpus() if gpu.obstacle is None} == {
        "A10-24G": 512,
        "A100-40G": 1024,
        "A100-80G": 2048,
        "A6000-48G": 1024,
        "B200-180G": 8192,
        "H100-80G": 4096,
        "H20-96G": 512,
        "H200-141G": 4096,
        "L4-24G": 1024,
        "L40S-48G": 2048,
        "RTX3090-24G": 512,
        "RTX4090-24G": 512,
        "RTX5090-32G": 512,
        "RTXPRO6000-96G": 4096,
    }


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("NVIDIA A10", "A10-24G"),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", "L4-24G"),
        ("NVIDIA L40S", "L40S-48G"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", "H200-141G"),
        ("NVIDIA RTX A6000", "A6000-48G"),
        ("NVIDIA GeForce RTX 3090", "RTX3090-24G"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTXPRO6000-96G"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_has_for_it(name: str, found: str | None) -> None:
    gpu = gpu_of(name)
    assert (gpu and gpu.name) == found


def test_a_service_has_the_steps_of_its_gpu_unless_told_or_on_several_nodes() -> None:
    config, names = ServeConfig(device="cuda"), ["NVIDIA GeForce RTX 4090"]
    assert with_step_budget(config, names).max_num_batched_tokens == 512
    assert with_step_budget(replace(config, max_num_seqs=1000), names).max_num_batched_tokens == 1000
    assert with_step_budget(replace(config, max_num_batched_tokens=64), names).max_num_batched_tokens == 64
    for other in (replace(config, device="cpu"), replace(config, nnodes=2, expert_parallel_size=2)):
        assert with_step_budget(other, names) == other
    assert with_step_budget(config, ["NVIDIA A10G"]) == with_step_budget(config, []) == config


def test_steps_of_one_rank_are_larger_on_a_processor_with_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.device.computes_in_tiles", lambda: True)
    assert step_budget(ServeConfig()) == 2048
    assert step_budget(ServeConfig(max_num_batched_tokens=100)) == 100
    for several in ("expert_parallel_size", "pipeline_parallel_size", "tensor_parallel_size"):
        assert step_budget(ServeConfig(**{several: 2})) == 256  # type: ignore[arg-type]
    assert step_budget(ServeConfig(), "cuda") == 4096
