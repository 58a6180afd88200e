"""The bytes of a step plan, for the ranks that execute it.

MessagePack arrays in the order of the fields below; token ids and block tables as int32 bytes. Equal plans have equal
bytes.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec

from moeserve.frames import pack, unpack, unpack_token_ids
from moeserve.plan import MAX_ANNOTATION_BYTES, Chunk, ChunkExtras, StepPlan
from moeserve.request import SamplingParams


class _WireExtras(msgspec.Struct, array_like=True, frozen=True):
    history: bytes | None
    num_prompt_tokens: int
    banned_token_ids: tuple[int, ...]
    prompt_targets: bytes | None
    num_top_logprobs: int


class _WireChunk(msgspec.Struct, array_like=True, frozen=True):
    request_id: str
    token_ids: bytes
    start: int
    block_table: bytes
    sampling: SamplingParams | None
    extras: _WireExtras | None
    drawn_by: int | None
    annotation: Annotated[bytes, msgspec.Meta(max_length=MAX_ANNOTATION_BYTES)] | None


class _WirePlan(msgspec.Struct, array_like=True, frozen=True):
    step: int
    chunks: list[_WireChunk]
    zeroed_blocks: bytes


def encode_plan(plan: StepPlan) -> bytes:
    """The bytes of a plan, a copy of it as it is now."""
    wire = _WirePlan(plan.step, [_pack_chunk(chunk) for chunk in plan.chunks], plan.zeroed_blocks.tobytes())
    return pack(wire)


def decode_plan(data: bytes) -> StepPlan:
    """The plan of such bytes. Raises DecodeError for anything else."""
    wire = unpack(data, _WirePlan)
    return StepPlan(wire.step, [_unpack_chunk(chunk) for chunk in wire.chunks], unpack_token_ids(wire.zeroed_blocks))


def _pack_chunk(chunk: Chunk) -> _WireChunk:
    extras = chunk.extras
    return _WireChunk(
        chunk.request_id,
        chunk.token_ids.tobytes(),
        chunk.start,
        chunk.block_table.tobytes(),
        chunk.sampling,
        None if extras is None else _pack_extras(extras),
        chunk.drawn_by,
        chunk.annotation,
    )


def _unpack_chunk(wire: _WireChunk) -> Chunk:
    return Chunk(
        wire.request_id,
        unpack_token_ids(wire.token_ids),
        wire.start,
        unpack_token_ids(wire.block_table),
        wire.sampling,
        None if wire.extras is None else _unpack_extras(wire.extras),
        wire.drawn_by,
        wire.annotation,
    )


def _pack_extras(extras: ChunkExtras) -> _WireExtras:
    return _WireExtras(
        _bytes_or_none(extras.history),
        extras.num_prompt_tokens,
        extras.banned_token_ids,
        _bytes_or_none(extras.prompt_targets),
        extras.num_top_logprobs,
    )


def _unpack_extras(wire: _WireExtras) -> ChunkExtras:
    return ChunkExtras(
        _array_or_none(wire.history),
        wire.num_prompt_tokens,
        wire.banned_token_ids,
        _array_or_none(wire.prompt_targets),
        wire.num_top_logprobs,
    )


def _bytes_or_none(token_ids: array[int] | None) -> bytes | None:
    return None if token_ids is None else token_ids.tobytes()


def _array_or_none(data: bytes | None) -> array[int] | None:
    return None if data is None else unpack_token_ids(data)
