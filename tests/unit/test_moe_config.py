"""Configurations of the GPU experts: what the heuristic and the candidates promise, for shapes of real models."""

import itertools

import pytest

from kernels.gpu.moe_config import (
    MAX_CANDIDATES,
    TUNED_NUM_TOKENS,
    Device,
    MoeConfig,
    MoeShape,
    allows_persistent,
    candidate_block_ms,
    candidate_tiles,
    candidate_variants,
    fits,
    heuristic_config,
    programs_that_fit,
    variant_of,
)

HOPPER = Device(shared_bytes=227 << 10, num_multiprocessors=132, has_descriptors=True)
ADA = Device(shared_bytes=99 << 10, num_multiprocessors=142, has_descriptors=False)
DEVICES = (HOPPER, ADA)
SIZES = [
    (128, 768, 2048, 8),
    (8, 14336, 4096, 2),
    (256, 2048, 7168, 8),
    (32, 2880, 2880, 4),
    (64, 1024, 2048, 8),
    (4, 36, 20, 2),
]
FORMATS = [("bfloat16", 0), ("float32", 0), ("int8", 0), ("fp8", 0), ("int4", 32), ("int4", 128)]
NUM_TOKENS = (*TUNED_NUM_TOKENS, 2, 3, 100, 8192, 65536)
QWEN = MoeShape(128, 768, 2048, 8, "bfloat16")


def all_shapes():
    for sizes, (weights, group) in itertools.product(SIZES, FORMATS):
        if group == 0 or (sizes[1] % group == 0 and sizes[2] % group == 0):
            yield MoeShape(*sizes, weights, group)


SHAPES = list(all_shapes())


def is_power_of_two(size):
    return size > 0 and size & (size - 1) == 0


@pytest.mark.parametrize("device", DEVICES, ids=["hopper", "ada"])
@pytest.mark.parametrize("shape", SHAPES, ids=MoeShape.name)
def test_every_shape_and_size_gets_a_configuration_that_runs(shape, device):
    for num_tokens in NUM_TOKENS:
        config = heuristic_config(shape, num_tokens, device)
        assert config.variant == variant_of(shape, num_tokens, device)
        tiles = (config.gate_up, config.down)
        assert all(is_power_of_two(size) for tile in tiles for size in (tile.block_n, tile.block_k, tile.num_warps))
        if config.variant in ("gemv", "gemv_split"):
            depths = (shape.hidden_size, shape.intermediate_size)
            if shape.weights == "int4":
                for tile, depth in zip(tiles, depths, strict=True):
                    assert tile.block_k % shape.group_size == 0 == depth % tile.block_k
            continue
        if shape.weights == "int4":
            assert {tile.block_k for tile in tiles} == {shape.group_size}
        assert config.block_m in (16, 32, 64, 128)
        assert fits(config.gate_up, config.block_m, "gate_up", shape, device)
        assert fits(config.down, config.block_m, "down", shape, device)
        if config.variant == "persistent":
            assert allows_persistent(shape, device)


@pytest.mark.parametrize(
    ("num_tokens", "variant", "block_m"),
    [
        (1, "gemv_split", 1),
        (4, "gemv_split", 1),
        (5, "tiled", 16),
        (128, "tiled", 16),
        (256, "tiled", 32),
        (512, "tiled", 64),
        (1024, "persistent", 128),
        (2048, "persistent", 128),
        (8192, "persistent", 128),
    ],
)
def test_the_variant_follows_the_rows_per_expert(num_tokens, variant, block_m):
    config = heuristic_config(QWEN, num_tokens, HOPPER)
    assert (config.variant, config.block_m) == (variant, block_m)


def test_few_tokens_share_programs_once_there_are_enough_of_them():
    wide = MoeShape(256, 2048, 7168, 8, "bfloat16")
    assert heuristic_config(wide, 1, HOPPER).variant == "gemv_split"
    assert heuristic_config(wide, 2, HOPPER).variant == "gemv"


def test_without_descriptors_many_rows_run_as_tiles():
    assert heuristic_config(QWEN, 8192, ADA).variant == "tiled"


def test_a_device_too_small_for_any_tile_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        heuristic_config(QWEN, 64, Device(shared_bytes=1 << 10, num_multiprocessors=1, has_descriptors=False))


@pytest.mark.parametrize("device", DEVICES, ids=["hopper", "ada"])
@pytest.mark.parametrize("shape", SHAPES, ids=MoeShape.name)
def test_candidates_are_few_distinct_and_fit(shape, device):
    for num_tokens in TUNED_NUM_TOKENS:
        for variant in candidate_variants(shape, num_tokens, device):
            for block_m in candidate_block_ms(shape, num_tokens):
                for projection in ("gate_up", "down"):
                    tiles = candidate_tiles(shape, num_tokens, projection, variant, block_m, device)
                    assert 1 <= len(tiles) <= MAX_CANDIDATES
                    assert len(set(tiles)) == len(tiles)
                    if variant in ("tiled", "persistent"):
                        assert all(fits(tile, block_m, projection, shape, device) for tile in tiles)


@pytest.mark.parametrize("num_tokens", TUNED_NUM_TOKENS)
def test_the_heuristic_is_among_the_candidates(num_tokens):
    config = heuristic_config(QWEN, num_tokens, HOPPER)
    assert config.variant in candidate_variants(QWEN, num_tokens, HOPPER)
    assert config.block_m == 1 or config.block_m in candidate_block_ms(QWEN, num_tokens)
    for projection, tile in (("gate_up", config.gate_up), ("down", config.down)):
        assert candidate_tiles(QWEN, num_tokens, projection, config.variant, config.block_m, HOPPER)[0] == tile


@pytest.mark.parametrize(("num_tokens", "few"), [(64, True), (128, True), (256, True), (1024, False), (8192, False)])
def test_a_multiprocessor_runs_two_programs_of_few_rows_or_short_products_at_once(num_tokens, few):
    config = heuristic_config(QWEN, num_tokens, HOPPER)
    assert programs_that_fit(config.gate_up, config.block_m, "gate_up", QWEN, HOPPER) >= (2 if few else 1)
    assert programs_that_fit(config.down, config.block_m, "down", QWEN, HOPPER) >= 2


def test_configurations_survive_being_written_down():
    config = heuristic_config(QWEN, 64, HOPPER)
    assert MoeConfig.from_dict(config.to_dict()) == config
    with pytest.raises(KeyError):
        MoeConfig.from_dict({**config.to_dict(), "variant": "magic"})
    with pytest.raises(TypeError):
        MoeConfig.from_dict({**config.to_dict(), "down": {"block_n": 16}})
