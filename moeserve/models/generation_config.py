"""What a model's `generation_config.json` says about stopping and sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from moeserve.models.errors import ModelError

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """EOS ids (empty where the file names none) and the sampling values that apply where a client gives none."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """Reads the file if there is one. Raises ModelError if it is not what it should be.

    A file that says `do_sample: false` is not taken for a wish to decode greedily: clients of chat protocols expect
    sampling unless they ask otherwise.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise TypeError("it holds no JSON object")
        eos = config.get("eos_token_id")
        eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(int(e) for e in eos)
        sampling = {name: float(config[name]) for name in _SAMPLING_FIELDS if config.get(name) is not None}
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid generation configuration: {error}.") from None
    return GenerationDefaults(eos_token_ids, sampling)
