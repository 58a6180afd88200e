"""One of two ranks that serve models on transformers' code: `python -m tests.support.transformers_rank JOB RANK`.

Both ranks know how many rows each has in each step, as from plans of an engine. Each computes requests of its own, and
in the middle a layer's experts change places. JOB: a JSON file, `Job`.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from experts.parallel.collectives import Collectives
from experts.placement.rebalance import Migration
from experts.routing.choices import unpack
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.experts.observe import routing_shape
from moeserve.engine.memory_plan import ModelPlan, plan_from_rank_0, plan_model
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.together import StepRows
from moeserve.model.files import is_gguf_folder
from moeserve.plan import Chunk, SamplingParams, StateUse, StepPlan, wanted_logits

NUM_TOKENS, BLOCK_SIZE = 5, 4
# The requests of each rank. In the last steps rank 1 has nothing to do, and then neither.
PROMPTS = ([[3 + 7 * n % 101 for n in range(19)], [5, 99, 17]], [[11 + 3 * n % 97 for n in range(6)]])
CONFIG = ServeConfig(
    kv_cache_memory=2**20,
    block_size=BLOCK_SIZE,
    max_model_len=48,
    max_num_seqs=4,
    model_impl="transformers",
    engine_timeout=300.0,  # Ranks may be far apart where other tests run.
)
_CHUNK, _MOVES_BEFORE = 6, 5
_BLOCKS = 8


def config_of(folder: Path) -> ServeConfig:
    """Return the settings for a model: of a GGUF file the code follows from its architecture."""
    return replace(CONFIG, model_impl="auto") if is_gguf_folder(folder) else CONFIG


@dataclass(frozen=True)
class Job:
    """folders: of the models, one after another. memory: `--expert-memory` for each, 0 for all experts in memory."""

    folders: list[str]
    memory: list[int]
    rendezvous: str


def main() -> None:
    job, rank = Job(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])
    torch.set_num_threads(1)
    collectives = Collectives(rank, 2)
    collectives.open(Path(job.rendezvous), timeout=60)
    for folder, memory in zip(map(Path, job.folders), job.memory, strict=True):
        config = replace(config_of(folder), expert_parallel_size=2, record_experts=True, expert_prefetch="auto")
        if memory:
            config = replace(config, expert_memory=memory, expert_store_dir=str(folder.parent / f"store{rank}"))
        plan = plan_model(folder, config)
        if rank:  # As rank 0 would tell it.
            assert plan.placement is not None
            slots = None if plan.residency is None else plan.residency.slots.num_slots
            plan = plan_from_rank_0(folder, config, plan.placement, plan.kv, slots)
        loaded = load_rank(folder, plan, config, lambda _: None, collectives)
        started = loaded.start()
        print(json.dumps(asdict(_serve(started, plan, rank))), flush=True)
        if started.memory is not None:
            started.memory.close()


@dataclass(frozen=True)
class Said:
    """tokens: of each request. chosen: how often the gates chose each expert of the first layer. held: the experts of
    that layer on this rank, before and after it was placed anew."""

    tokens: list[list[int]]
    chosen: list[int]
    held: list[list[int]]


def _serve(started: Rank, plan: ModelPlan, rank: int) -> Said:
    prompts, group, shape = PROMPTS[rank], started.group, routing_shape(plan.spec)
    assert group is not None
    assert shape is not None
    texts = [array("i", prompt) for prompt in prompts]
    chosen, held = [0] * shape.num_experts, [sorted(group.experts.experts_here(0))]
    of_both = [_steps(PROMPTS[0]), _steps(PROMPTS[1])]
    for number, pieces in enumerate(of_both[rank]):
        if number == _MOVES_BEFORE:
            _move(started, plan)
            held.append(sorted(group.experts.experts_here(0)))
        steps = [steps[number] for steps in of_both]
        rows = [sum(count for _, _, count in step) for step in steps]
        wanted = [sum(start + count >= len(PROMPTS[r][q]) for q, start, count in steps[r]) for r in (0, 1)]
        started.begin_step(StepRows(rows, wanted, only_decodes=False))
        step = StepPlan(number, [_chunk(texts, prompts, piece, bool(plan.spec.state_layers)) for piece in pieces])
        result = started.runner.launch(step).result()
        for (request, start, count), computed in zip(pieces, result.chunks, strict=True):
            assert computed.error is None, computed.error
            if computed.token_id is not None:
                assert start + count == len(texts[request])
                texts[request].append(computed.token_id)
        if pieces:
            assert result.routing is not None
            ids = unpack(bytes(result.routing), shape, step.num_tokens, wanted_logits(step.chunks)[0])
            for expert in ids[0].flatten().tolist():
                chosen[expert] += 1
    tokens = [text[len(prompt) :].tolist() for text, prompt in zip(texts, prompts, strict=True)]
    return Said(tokens, chosen, held)


def _steps(prompts: Sequence[Sequence[int]]) -> list[list[tuple[int, int, int]]]:
    """(request, first token, tokens) of each step of a rank; requests begin one after another, three steps apart."""
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(10)]
    for request, prompt in enumerate(prompts):
        number, start = 3 * request, 0
        while start < len(prompt) + NUM_TOKENS - 1:
            count = min(_CHUNK, len(prompt) - start) if start < len(prompt) else 1
            steps[number].append((request, start, count))
            number, start = number + 1, start + count
    return steps


def _chunk(
    texts: Sequence[array[int]], prompts: Sequence[Sequence[int]], piece: tuple[int, int, int], has_state: bool
) -> Chunk:
    request, start, count = piece
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return Chunk(
        str(request),
        texts[request][start : start + count],
        start,
        array("i", range(_BLOCKS * request, _BLOCKS * (request + 1))),
        sampling if start + count >= len(prompts[request]) else None,
        state=StateUse(request) if has_state else None,
    )


def _move(started: Rank, plan: ModelPlan) -> None:
    """Let the ranks exchange an expert of the first layer."""
    group, migrator = started.group, started.migrator
    assert group is not None
    assert migrator is not None
    ranks = list(group.experts.placement.ranks[0])
    last = len(ranks) - 1
    ranks[0], ranks[last] = ranks[last], ranks[0]
    migrator.begin(Migration(1, 0, tuple(ranks)))
    while (outcome := migrator.outcome()) is None:
        time.sleep(0.01)
    assert outcome.error is None, outcome.error
    # Both switch before the same step, which the exchange of its rows sees to.
    migrator.switch(1)


if __name__ == "__main__":
    main()
