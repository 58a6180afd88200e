"""Public prefixes: prompts that the operator declares in a file, computed once and shared by all keys.

They are computed in the namespace PUBLIC, in which no client's request runs, and pinned there. A client's request uses
them as far as its prompt equals one, and goes on in its own namespace.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from moeserve.config import ConfigError
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.prompts import PUBLIC_FIELDS, PrefixBody, check_prefix
from moeserve.frontend.http import ApiError, longest_output
from moeserve.frontend.prepare.messages import Prefix, expect
from moeserve.frontend.relay.request_group import EngineGone, RequestRejected
from moeserve.frontend.services import Services
from moeserve.plan import FinishReason, SamplingParams, Terms
from moeserve.wire import Generate, Rest, pack_token_ids
from radix_cache import PUBLIC

log = structlog.get_logger(__name__)

_POLL_S = 0.05


def load_public_prefixes(file: str | None) -> list[bytes]:
    """Return the prefixes in a file, checked: a JSON list of bodies as `/v1/cache/warm` takes them. Raises
    ConfigError."""
    if file is None:
        return []
    try:
        entries = msgspec.json.decode(Path(file).read_bytes(), type=list[msgspec.Raw])
    except OSError as error:
        raise ConfigError(f"cannot read the public prefixes in {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"the public prefixes in {file} are no JSON list of objects") from None
    prefixes = []
    for number, entry in enumerate(entries):
        try:
            prefix, unknown = bodies.decode_json(bytes(entry), PrefixBody)
            check_prefix(prefix, PUBLIC_FIELDS)
        except ApiError as error:
            raise ConfigError(f"public prefix {number} in {file}: {error.message}") from None
        if unknown:
            raise ConfigError(f"public prefix {number} in {file} has an unknown field {unknown[0]!r}")
        prefixes.append(bytes(entry))
    return prefixes


async def publish_prefixes(services: Services, prefixes: Sequence[bytes]) -> None:
    """Compute and pin the prefixes once the engine is ready, and again in each of its lives.

    One that cannot be is logged, and the others follow.
    """
    while services.engine.dead_reason is None:
        if services.not_ready_reason() is not None or services.engine.rest is not Rest.AWAKE:
            await asyncio.sleep(_POLL_S)
            continue
        lost = services.engine.lost
        for number, prefix in enumerate(prefixes):
            try:
                num_tokens = await _publish(services, prefix)
            except (ApiError, EngineGone, RequestRejected, RuntimeError) as error:
                reason = error.message if isinstance(error, ApiError) else str(error)
                log.error("public_prefix_failed", number=number, error=reason)
            else:
                log.info("public_prefix_ready", number=number, tokens=num_tokens)
        await lost.wait()


async def _publish(services: Services, prefix: bytes) -> int:
    """Compute a prefix on every rank and pin it. Return its tokens that are shared: those in whole blocks."""
    facts = services.check_serving()
    token_ids = expect(await services.prepare_own("prefix", prefix), Prefix).token_ids
    assert token_ids is not None
    longest_output(len(token_ids), facts.max_model_len)
    packed = pack_token_ids(token_ids)
    for _ in range(services.run.config.expert_parallel_size):
        # It goes to a rank that lacks the prefix.
        await _compute(services, packed)
    arguments = {"namespace": PUBLIC, "token_ids": packed, "share": 1.0, "pin_share": 1.0}
    pinned = await services.engine.control("pin_prefix", arguments)
    if pinned.error is not None or pinned.result["over_budget"] or pinned.result["missing_tokens"]:
        raise RuntimeError(pinned.error or "there are not enough KV blocks to keep it")
    return int(pinned.result["tokens"])


async def _compute(services: Services, packed: bytes) -> None:
    """Compute a prefix, int32 bytes, on one rank."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    generate = Generate(f"public-{secrets.token_hex(12)}", packed, sampling, PUBLIC, terms=Terms(patient=True))
    async with services.engine.submit([generate]) as group:
        await group.admitted()
        while group.num_open:
            for _, output in await group.next():
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise RuntimeError(output.error or "the request was aborted")
