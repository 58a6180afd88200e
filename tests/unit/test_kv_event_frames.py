"""Events as bytes: equal to the golden files, and read by the definitions that consumers have."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moeserve.engine.kv.events.blocks import AllBlocksCleared, BlockRemoved, BlockStored
from moeserve.engine.kv.events.publisher import END_OF_REPLAY, pack_batch, pack_number

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
EVENTS = [
    AllBlocksCleared(),
    BlockStored([2**64 - 1, 7], None, array("i", [1, 2, 300, 70000]).tobytes(), "salt"),
    BlockStored([8], 7, array("i", [5, 6]).tobytes()),
    BlockRemoved([8, 7]),
]


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", omit_defaults=True):
    """As vLLM defines it since 0.26; the fields without a default are always there."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    """As vLLM defined it before."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int | bytes]
    medium: str | None


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize("form", ["map", "array"])
def test_the_bytes_of_a_batch_are_those_of_the_golden_file(form):
    assert (
        pack_batch(1.5, EVENTS, 1, 2, as_maps=form == "map").hex()
        == (GOLDEN / f"kv_events_{form}.hex").read_text().strip()
    )


@pytest.mark.parametrize(("form", "kind"), [("map", Batch), ("array", ArrayBatch)])
def test_consumers_read_a_batch_by_their_own_definitions(form, kind):
    batch = msgspec.msgpack.decode(pack_batch(1.5, EVENTS, 1, 2, as_maps=form == "map"), type=kind)
    cleared, salted, other, removed = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 1)
    assert type(cleared).__name__.startswith("Cleared")
    assert (salted.block_hashes, salted.parent_block_hash, salted.token_ids) == (
        [2**64 - 1, 7],
        None,
        [1, 2, 300, 70000],
    )
    assert (salted.block_size, salted.medium, salted.extra_keys) == (2, "GPU", [["salt"], None])
    assert (other.block_hashes, other.parent_block_hash, other.extra_keys) == ([8], 7, None)
    assert (removed.block_hashes, removed.medium) == ([8, 7], "GPU")


def test_numbers_are_eight_bytes_big_endian_and_the_end_is_minus_one():
    assert pack_number(258) == b"\0\0\0\0\0\0\1\2"
    assert END_OF_REPLAY == b"\xff" * 8
