"""The `EngineReady` of an engine that is made up."""

from __future__ import annotations

import os
from typing import Any

from moeserve.wire import EngineReady


def engine_ready(**facts: Any) -> EngineReady:
    """The message of an engine on a CPU in this process, whose model is small and has no experts. facts: fields that
    differ."""
    small: dict[str, Any] = {
        "pid": os.getpid(),
        "model_hash": "none",
        "max_model_len": 64,
        "vocab_size": 100,
        "eos_token_ids": [],
        "default_sampling": {},
        "max_num_seqs": 8,
        "max_num_queued_reqs": 8,
        "num_blocks": 32,
        "block_size": 8,
        "device": "cpu",
        "dtype": "float32",
        "weights_bytes": 1,
        "kv_bytes": 1,
    }
    return EngineReady(**{**small, **facts})
