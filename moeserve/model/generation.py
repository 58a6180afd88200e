"""The defaults of a model's `generation_config.json`: where an answer ends, and how it is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeserve.model.files import read_text
from moeserve.model.spec import ModelError
from moeserve.settings.generation import MAX_NEW_TOKENS, SAMPLING_BOUNDS, is_length, is_sampling_value

_MAX_END_TOKENS = 1024


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """EOS ids, and sampling values for requests that give none. Both are empty if the file names none.

    left_out: the values of the file that are out of the bounds for requests, as `name=value`. max_new_tokens: the
    longest answer to requests that set no bound, None without one.
    """

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    max_new_tokens: int | None = None


def load_generation_defaults(directory: Path, overrides: Mapping[str, float] = {}) -> GenerationDefaults:
    """Read the folder's ``generation_config.json``, if it has one. Raise ModelError if the file is not valid.

    overrides: values that go before the file's (`parse_generation`).

    A sampling value out of its bounds, or NaN, is left out: the client has not given it and could not change it.
    ``do_sample: false`` does not mean greedy decoding here: clients of chat protocols expect sampling unless they ask
    otherwise.
    """
    path = directory / "generation_config.json"
    try:
        config = json.loads(read_text(path)) if path.exists() else {}
        if not isinstance(config, dict):
            raise TypeError("it holds no JSON object")
        eos_token_ids = token_ids(config.get("eos_token_id"))
        if len(eos_token_ids) > _MAX_END_TOKENS or not all(type(token) is int for token in eos_token_ids):
            raise TypeError("its eos_token_id is no token id and no short list of token ids")
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid generation configuration: {error}.") from None
    config |= overrides
    given = {name: config[name] for name in (*SAMPLING_BOUNDS, MAX_NEW_TOKENS) if config.get(name) is not None}
    longest = given[MAX_NEW_TOKENS] if is_length(given.get(MAX_NEW_TOKENS)) else None
    sampling = {name: float(given[name]) for name in SAMPLING_BOUNDS if is_sampling_value(name, given.get(name))}
    used = sampling if longest is None else {*sampling, MAX_NEW_TOKENS}
    left_out = tuple(f"{name}={str(value)[:40]}" for name, value in given.items() if name not in used)
    return GenerationDefaults(eos_token_ids, sampling, left_out, longest)
