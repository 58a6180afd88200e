"""The bytes of a step result, from the rank that computed it to the engine: MessagePack arrays, as in `plan_codec`."""

from __future__ import annotations

import msgspec

from moeserve.frames import pack, unpack
from moeserve.plan import ChunkResult, StepResult, TokenLogprobs

_Entry = tuple[float, list[tuple[int, float]]]


class _WireChunkResult(msgspec.Struct, array_like=True, frozen=True):
    token_id: int | None
    logprobs: _Entry | None
    prompt_logprobs: list[_Entry] | None
    error: str | None
    annotation: bytes | None


class _WireResult(msgspec.Struct, array_like=True, frozen=True):
    step: int
    chunks: list[_WireChunkResult]
    routing: bytes | None
    sent: list[int] | None


def encode_result(result: StepResult) -> bytes:
    """The bytes of a result."""
    routing = None if result.routing is None else bytes(result.routing)
    wire = _WireResult(result.step, [_pack_chunk(chunk) for chunk in result.chunks], routing, result.sent)
    return pack(wire)


def decode_result(data: bytes) -> StepResult:
    """The result of such bytes. Raises DecodeError for anything else."""
    wire = unpack(data, _WireResult)
    return StepResult(wire.step, [_unpack_chunk(chunk) for chunk in wire.chunks], wire.routing, wire.sent)


def _pack_chunk(chunk: ChunkResult) -> _WireChunkResult:
    prompt = chunk.prompt_logprobs
    return _WireChunkResult(
        chunk.token_id,
        None if chunk.logprobs is None else _pack_entry(chunk.logprobs),
        None if prompt is None else [_pack_entry(entry) for entry in prompt],
        chunk.error,
        chunk.annotation,
    )


def _unpack_chunk(wire: _WireChunkResult) -> ChunkResult:
    prompt = wire.prompt_logprobs
    return ChunkResult(
        wire.token_id,
        None if wire.logprobs is None else _unpack_entry(wire.logprobs),
        None if prompt is None else [_unpack_entry(entry) for entry in prompt],
        wire.error,
        wire.annotation,
    )


def _pack_entry(entry: TokenLogprobs) -> _Entry:
    return entry.logprob, list(entry.top)


def _unpack_entry(entry: _Entry) -> TokenLogprobs:
    return TokenLogprobs(entry[0], tuple(entry[1]))
