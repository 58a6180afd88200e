"""The setting `--speculative-config`: which draft tokens are made."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.settings.objects import json_object

DRAFT_METHODS = ("none", "ngram", "suffix", "mtp", "auto")
# vLLM's methods that need weights of their own.
_DRAFT_MODELS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")
# vLLM's former names of `mtp`.
_MTP_METHODS = ("deepseek_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
# The number of drafts out of known text that a chunk may have where `num_speculative_tokens` counts an MTP layer's.
_TEXT_DRAFTS = 16
_BOUNDS = {"num_speculative_tokens": (1, 64), "prompt_lookup_min": (3, 32)}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Which draft tokens are made, and how many a chunk may have.

    `method`: one of DRAFT_METHODS. `prompt_lookup_min`: the least tokens that match before a guess out of known text.
    `num_predicted_tokens`: of them an MTP layer drafts, 0 for another method than `mtp`.
    """

    method: str = "none"
    num_speculative_tokens: int = 16
    prompt_lookup_min: int = 3
    num_predicted_tokens: int = 0


def parse_speculative(text: str) -> SpeculativeConfig:
    """Return the drafts that `{"method": "suffix", "num_speculative_tokens": 8}`, or `suffix`, asks for.

    Raise ValueError, a clause, for drafts that are not served.
    """
    text = text.strip()
    given = json_object(text) if text.startswith("{") else {"method": text}
    method = given.pop("method", "auto")
    method = "mtp" if method in _MTP_METHODS else method
    if method in _DRAFT_MODELS:
        raise ValueError(f"the method {method} needs a draft model, and only {', '.join(DRAFT_METHODS)} are served")
    if method not in DRAFT_METHODS:
        raise ValueError(f"{str(method)[:80]!r} is not one of {', '.join(DRAFT_METHODS)}")
    for name, value in given.items():
        if name not in _BOUNDS:
            raise ValueError(f"{name[:80]!r} is not one of method, {', '.join(_BOUNDS)}")
        least, most = _BOUNDS[name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is a whole number from {least} to {most}")
    if method == "mtp":
        predicted = given.pop("num_speculative_tokens", 1)
        given |= {"num_speculative_tokens": max(predicted, _TEXT_DRAFTS), "num_predicted_tokens": predicted}
    return SpeculativeConfig(method, **given)
