"""Configurations of the GPU experts: their promises for shapes of real models."""

import itertools
from dataclasses import replace

import pytest

from kernels.gpu.moe_config import MoeShape, config_for, fits, programs_that_fit

# Bytes of shared memory that a program may have.
HOPPER, ADA = 227 << 10, 99 << 10
SIZES = [
    (128, 768, 2048, 8),
    (8, 14336, 4096, 2),
    (256, 2048, 7168, 8),
    (32, 2880, 2880, 4),
    (64, 1024, 2048, 8),
    (4, 36, 20, 2),
]
FORMATS = [("bfloat16", 0), ("float32", 0), ("int8", 0), ("fp8", 0), ("int4", 32), ("int4", 128)]
NUM_TOKENS = (1, 2, 3, 4, 16, 64, 256, 1024, 4096, 100, 8192, 65536)
QWEN = MoeShape(128, 768, 2048, 8, "bfloat16")


def all_shapes():
    for sizes, (weights, group) in itertools.product(SIZES, FORMATS):
        if group == 0 or (sizes[1] % group == 0 and sizes[2] % group == 0):
            yield MoeShape(*sizes, weights, group)


SHAPES = list(all_shapes())


def is_power_of_two(size):
    return size > 0 and size & (size - 1) == 0


@pytest.mark.parametrize("device", [HOPPER, ADA], ids=["hopper", "ada"])
@pytest.mark.parametrize("shape", SHAPES, ids=MoeShape.name)
def test_every_shape_and_size_gets_a_configuration_that_runs(shape, device):
    for num_tokens in NUM_TOKENS:
        config = config_for(shape, num_tokens, device)
        tiles = (config.gate_up, config.down)
        assert all(is_power_of_two(size) for tile in tiles for size in (tile.block_n, tile.block_k, tile.num_warps))
        if shape.weights == "int4":
            assert {tile.block_k for tile in tiles} == {shape.group_size}
        assert config.block_m in (16, 32, 64, 128)
        assert fits(config.gate_up, config.block_m, "gate_up", shape, device)
        assert fits(config.down, config.block_m, "down", shape, device)


@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 16), (128, 16), (256, 32), (512, 64), (8192, 128)])
def test_tiles_follow_the_rows_per_expert(num_tokens, block_m):
    assert config_for(QWEN, num_tokens, HOPPER).block_m == block_m


def test_a_device_too_small_for_any_tile_is_refused():
    with pytest.raises(ValueError, match="shared memory"):
        config_for(QWEN, 64, 1 << 10)


@pytest.mark.parametrize("device", [163 << 10, ADA], ids=["ampere", "ada"])
def test_packed_gate_and_up_are_narrow_where_operands_pass_through_registers(device):
    shape = replace(QWEN, weights="packed")
    found = [config_for(shape, num_tokens, device, reads_tiles=False) for num_tokens in (512, 2048)]
    assert [(one.block_m, one.gate_up.block_n, one.gate_up.num_warps) for one in found] == [(64, 32, 4), (128, 32, 8)]
    assert config_for(shape, 2048, HOPPER).gate_up.block_n == 64
    few = (config_for(shape, 64, device, reads_tiles=reads_tiles) for reads_tiles in (False, True))
    assert len({(one.block_m, one.gate_up) for one in few}) == 1


@pytest.mark.parametrize("num_tokens", [64, 128, 256])
def test_a_multiprocessor_runs_two_programs_of_few_rows_at_once(num_tokens):
    config = config_for(QWEN, num_tokens, HOPPER)
    assert programs_that_fit(config.gate_up, config.block_m, "gate_up", QWEN, HOPPER) >= 2
    assert programs_that_fit(config.down, config.block_m, "down", QWEN, HOPPER) >= 2


@pytest.mark.parametrize(("weights", "at_once", "width"), [("bfloat16", 1, 256), ("int8", 2, 128)])
def test_many_rows_go_down_by_one_wide_program_where_weights_have_16_bits(weights, at_once, width):
    shape = replace(QWEN, weights=weights)
    config = config_for(shape, 8192, HOPPER)
    assert config.down.block_n == width
    assert programs_that_fit(config.down, config.block_m, "down", shape, HOPPER) >= at_once
