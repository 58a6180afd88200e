"""Prompts for the whole engine: half of them begin alike, and each is also computed by itself, as the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.plan import SamplingParams


def prompts_with_a_common_beginning() -> list[list[int]]:
    """Return ten prompts; the first five are the other five behind the same 37 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(1, 128) for _ in range(37)]
    tails = [[rng.randrange(1, 128) for _ in range(count)] for count in (1, 5, 9, 23, 40)]
    return [shared + tail for tail in tails] + tails


def complete_alone(
    model_dir: Path, config: ServeConfig, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
) -> list[Completion]:
    """Compute every prompt by itself in one chunk, without a cache."""
    llm = TokenEngine(model_dir, replace(config, enable_prefix_caching=False))
    return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(prompts, samplings, strict=True)]
