"""The statuses that model processes report to the supervisor on a pipe, each a JSON object on a line."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Loading(msgspec.Struct, tag_field="event", tag="loading"):
    """`done` of `total` bytes of weights are read."""

    done: int
    total: int
    stage: str = "loading weights"


class Ready(msgspec.Struct, tag_field="event", tag="ready"):
    """The engine takes requests. `model_max_len` is the model's own limit; `max_model_len` may be clamped below it.

    Of each rank's recurrent states there are `num_state_slots` for running requests and `num_snapshots` for prefixes.
    Layers that see the last `window` tokens have `num_window_blocks` blocks of their own, on all ranks; both 0 without.
    `pid`: of the engine's process, which may be a copy of the one that reports (`launcher.copies`).
    `kernels` names the compiled kernels that compute on the CPU, and `no_compiled_kernels` says in a sentence why torch
    computes there in place of them, if it does.
    `model` says in a line what the model is, `arithmetic` how it multiplies. `short_context`: see
    `RopeSpec.short_context`. `default_max_tokens`, `longest_answer`: see `EngineReady`.
    """

    device: str
    dtype: str
    weights_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    model_max_len: int | None = None
    kernels: str | None = None
    no_compiled_kernels: str | None = None
    num_state_slots: int = 0
    num_snapshots: int = 0
    state_row_bytes: int = 0
    num_window_blocks: int = 0
    window: int = 0
    model: str | None = None
    pid: int | None = None
    arithmetic: str = ""
    short_context: int | None = None
    default_max_tokens: int | None = None
    longest_answer: int | None = None


class Computing(msgspec.Struct, tag_field="event", tag="computing"):
    """A rank other than 0 takes steps from now on."""


class Failed(msgspec.Struct, tag_field="event", tag="error"):
    """The engine ends; `message` says why, in one sentence.

    `code`: the exit code, or the signal below zero, of its process that ended first, where the reporter knows it.
    `of_settings`: the settings cannot be used, so that another start would fail alike.
    """

    message: str
    code: int | None = None
    of_settings: bool = False


class Met(msgspec.Struct, tag_field="event", tag="met"):
    """A rank other than 0 has found the life `incarnation` of rank 0."""

    incarnation: int


class Forked(msgspec.Struct, tag_field="event", tag="forked"):
    """A copy of the process that has loaded the model, or a rank's part of it, serves from now on."""

    rank: int
    pid: int


class Ended(msgspec.Struct, tag_field="event", tag="ended"):
    """A copy has ended, with exit code `code` or by a signal below zero. Another copy can be made."""

    rank: int
    pid: int
    code: int


Status = Loading | Ready | Computing | Failed | Met | Forked | Ended
# Sends a status to the supervisor.
Report = Callable[[Status], None]


def progress_to(report: Report) -> Callable[[str, int, int], None]:
    """Return a function that reports a stage of loading, its bytes so far and all of its bytes."""
    return lambda stage, done, total: report(Loading(done, total, stage))
