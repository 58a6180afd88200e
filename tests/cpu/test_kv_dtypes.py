"""Keys and values of 16 and 8 bits on a CPU: rows, attention against the reference, and the bits of whole engines."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.token_engine import Completion, TokenEngine
from kernels.attention import paged_attention, paged_attention_reference
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.attention import AttentionTiles, torch_attention
from kernels.cpu.library import native_kernels
from kernels.kv_rows import SCALE_BYTES, pack_rows, row_width, unpack_rows
from kernels.rope_kv import rotate_and_store, write_kv
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import cpu_kv_dtype, read_spec
from moeserve.model.kv_pool import KVPool, kv_block_bytes
from tests.support.llm_prompts import (
    BASE,
    BLOCK,
    GREEDY,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_cold_and_cached,
    complete_alone,
    in_any_batch,
    without_window_blocks,
)
from tests.support.tiny_models import build

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_SIZE = 8


kinds = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)


def with_torch(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, **flags: object) -> Tensor:
    tiling = AttentionTiles(plan.chunks, plan.block_size, 16)
    return torch_attention(q, keys, values, tiling, **{"window": None, "sinks": None, **flags})  # type: ignore[arg-type]


bodies = pytest.mark.parametrize("body", [paged_attention, with_torch], ids=["compiled", "torch"])


def pools(kv_heads: int, dim: int, dtype: torch.dtype, num_blocks: int = 128) -> list[Tensor]:
    sizes = torch.rand(kv_heads, num_blocks * BLOCK_SIZE, 1).mul(6).exp()
    return [pack_rows(torch.randn(kv_heads, num_blocks * BLOCK_SIZE, dim) * sizes.rsqrt(), dtype) for _ in range(2)]


def test_a_row_of_integers_is_within_half_a_step_of_its_numbers() -> None:
    rows = torch.randn(7, 5, 48) * 10 ** torch.linspace(-6, 6, 7)[:, None, None]
    packed = pack_rows(rows, torch.int8)
    assert packed.shape[-1] == row_width(48, torch.int8) == 48 + SCALE_BYTES
    step = rows.abs().amax(-1, keepdim=True) / 127
    assert ((unpack_rows(packed, torch.float32) - rows).abs() <= step * 0.5001).all()
    assert unpack_rows(pack_rows(torch.zeros(2, 16), torch.int8), torch.float32).count_nonzero() == 0


@kinds
@pytest.mark.parametrize("dim", [16, 24, 64, 80])
def test_new_rows_are_stored_with_the_bits_of_the_torch_rounding(dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(40, 3 + 2 * 2, dim) * torch.logspace(-3, 3, 40)[:, None, None]
    qkv[5] = 0
    angles, slots = torch.zeros(40, dim // 2), torch.randperm(64)[:40]
    found, expected = ([torch.zeros(2, 64, row_width(dim, dtype), dtype=dtype) for _ in range(2)] for _ in range(2))
    write_kv(*expected, slots, qkv[:, 3:5], qkv[:, 5:])
    rotate_and_store(qkv, angles.cos(), angles.sin(), slots, *found, interleaved=False)
    for pool, reference in zip(found, expected, strict=True):
        assert torch.equal(pool.view(torch.uint8), reference.view(torch.uint8))


@kinds
@bodies
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 32), (16, 2, 128), (5, 1, 24), (20, 1, 576)]
)
@pytest.mark.parametrize(("window", "with_sinks"), [(None, False), (70, False), (None, True), (5, True)])
def test_attention_is_that_of_the_widened_rows(
    heads: int, kv_heads: int, dim: int, window: int | None, with_sinks: bool, dtype: torch.dtype, body: object
) -> None:
    keys, values = pools(kv_heads, dim, dtype)
    blocks = array("i", torch.randperm(128).tolist())
    plan = AttentionPlan([ChunkSpan(5, 600, blocks), ChunkSpan(1, 700, blocks), ChunkSpan(21, 0, blocks)], BLOCK_SIZE)
    q = torch.randn(plan.num_rows, heads, dim)
    flags = {"scale": dim**-0.5, "window": window, "sinks": torch.randn(heads) if with_sinks else None}
    table = torch.tensor(blocks.tolist(), dtype=torch.int32).repeat(3, 1)
    lengths, starts = torch.tensor([605, 701, 21]), plan.arrays().first_rows
    rounds = dtype == torch.bfloat16 and body is paged_attention and native_kernels() is not None
    asked = q.bfloat16().float() if rounds else q
    expected = paged_attention_reference(asked, keys, values, table, lengths, starts, block_size=BLOCK_SIZE, **flags)
    # Each weight is off by up to 2^-9 of itself where it is rounded.
    atol = 2**-9 * values.abs().max().item() if rounds else 4e-4
    torch.testing.assert_close(body(q, keys, values, plan, **flags), expected, atol=atol, rtol=1e-3)  # type: ignore[operator]


@kinds
@bodies
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_over_narrow_kv_has_the_same_bits_in_any_batch_chunking_and_place(
    group: int, window: int | None, dtype: torch.dtype, body: object
) -> None:
    keys, values = pools(2, 64, dtype)
    run = array("i", range(60))
    scattered = array("i", (60 + torch.randperm(60)).tolist())
    for own, other in zip(run, scattered, strict=True):
        for pool in (keys, values):
            pool[:, other * BLOCK_SIZE : (other + 1) * BLOCK_SIZE] = pool[:, own * BLOCK_SIZE : (own + 1) * BLOCK_SIZE]
    q = torch.randn(400, 2 * group, 64)

    def attend(first: int, last: int, blocks: array[int], beside: int = 0) -> Tensor:
        chunks = [ChunkSpan(last - first, first, blocks), *[ChunkSpan(1, 430, blocks)] * beside]
        rows = torch.cat([q[first:last], torch.randn(beside, *q.shape[1:])])
        plan = AttentionPlan(chunks, BLOCK_SIZE)
        return body(rows, keys, values, plan, scale=0.125, window=window)[: last - first]  # type: ignore[operator]

    whole = attend(0, 400, run)
    for first, last in [(0, 1), (0, 7), (3, 90), (254, 258), (300, 400), (399, 400), (320, 321)]:
        for blocks in (run, scattered):
            for beside in (0, 3):
                assert torch.equal(attend(first, last, blocks, beside), whole[first:last]), (first, last, beside)


@kinds
@bodies
def test_later_keys_never_matter_and_values_that_are_no_numbers_are_seen(dtype: torch.dtype, body: object) -> None:
    keys, values = pools(1, 16, dtype)
    plan = AttentionPlan([ChunkSpan(1, 10, array("i", [0, 1]))], BLOCK_SIZE)
    q = torch.randn(1, 2, 16)
    before = body(q, keys, values, plan, scale=0.25)  # type: ignore[operator]
    for pool in (keys, values):
        pool[:, 11:16] = pack_rows(torch.full((1, 5, 16), 1e30), dtype)
    assert torch.equal(body(q, keys, values, plan, scale=0.25), before)  # type: ignore[operator]
    write_kv(keys, values, torch.tensor([4]), torch.randn(1, 1, 16), torch.full((1, 1, 16), torch.nan))
    assert body(q, keys, values, plan, scale=0.25).isnan().all()  # type: ignore[operator]


# Grouped queries; windows and sinks; latent attention, of all positions and of some.
@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "deepseek_v3-yarn", "deepseek_v32-yarn"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def config(request: pytest.FixtureRequest) -> ServeConfig:
    return replace(BASE, kv_cache_dtype=request.param)


@pytest.fixture(scope="module")
def alone(model_dir: Path, config: ServeConfig) -> list[Completion]:
    return complete_alone(model_dir, config=config)


@in_any_batch
def test_narrow_kv_gives_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    model_dir: Path, config: ServeConfig, alone: list[Completion], changes: dict[str, object]
) -> None:
    llm = TokenEngine(model_dir, replace(config, **changes))  # type: ignore[arg-type]
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100


def test_requests_preempted_over_narrow_kv_end_with_the_same_bits(
    model_dir: Path, config: ServeConfig, alone: list[Completion]
) -> None:
    spec, dtype = read_spec(model_dir, config)
    memory = 26 * kv_block_bytes(spec.kv_layers, BLOCK, cpu_kv_dtype(config, spec, dtype))
    changes = replace(config, max_model_len=92, kv_cache_memory=memory, max_num_seqs=8, max_num_batched_tokens=16)
    with without_window_blocks():
        llm = TokenEngine(model_dir, changes)
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)
    assert llm.scheduler.counters.preemptions > 0
    llm.scheduler.check_idle()


def test_torch_computes_nearly_the_same_without_the_compiled_kernels(
    model_dir: Path, config: ServeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PROMPTS[:4]
    compiled = TokenEngine(model_dir, config).generate(prompts, GREEDY)
    for module in ("kernels.attention", "kernels.indexed_attention", "kernels.rope_kv"):
        monkeypatch.setattr(f"{module}.native_kernels", lambda: None)
    found = TokenEngine(model_dir, config).generate(prompts, GREEDY)
    one_by_one = [TokenEngine(model_dir, config).generate([prompt], GREEDY)[0] for prompt in prompts]
    assert_same(found, one_by_one)
    if model_dir.name.startswith("deepseek_v32"):
        return  # Rounding decides which of two positions with nearly the same score is chosen.
    for ours, theirs in zip(found, compiled, strict=True):
        assert ours.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=0.02)


def test_a_dtype_that_cannot_be_kept_is_refused_in_one_sentence(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    spec, _ = read_spec(tmp_path, BASE)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype int8 .*--dtype float32"):
        cpu_kv_dtype(replace(BASE, kv_cache_dtype="int8"), spec, torch.bfloat16)
    assert cpu_kv_dtype(replace(BASE, kv_cache_dtype="bfloat16"), spec, torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_copied_blocks_have_the_numbers_of_their_sources_in_every_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    build("mixtral").save_pretrained(tmp_path)
    spec, _ = read_spec(tmp_path, ServeConfig())
    pool = KVPool(spec.kv_layers, 5, 4, dtype)
    for blocks in pool.block_bytes():
        blocks.random_(255)
    before = [blocks.clone() for blocks in pool.block_bytes()]
    pool.copy_blocks(array("i", [4, 1, 0, 3]))
    for blocks, former in zip(pool.block_bytes(), before, strict=True):
        assert torch.equal(blocks, former[:, [0, 4, 2, 0, 4]])
