"""Keys and values of a layer are in memory when a layer is said to be computed, and stay as they are."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.kv_disk.copier import as_block_memory
from moeserve.engine.kv_transfer.exchange import OfferedBlocks, arrays_of_layers
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_scheduler
from moeserve.engine.rank import StepProgress
from moeserve.kv_transfer import TicketOffice
from moeserve.model import decoder
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.steps import LocalExecutor, Steps
from tests.support.tiny_models import save

SIZE = 4
CONFIG = ServeConfig(
    kv_cache_memory=2**20, block_size=SIZE, max_model_len=160, max_num_batched_tokens=17, max_num_seqs=4
)


@pytest.mark.parametrize("case", ["mixtral", "llama"])
def test_layers_that_are_sent_while_a_step_is_computed_are_those_of_the_step(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a long step: a step of few rows is one call, during which no layer is said to be computed.
    monkeypatch.setattr(decoder, "_ROWS_OF_ONE_CALL", 0)
    save(case, tmp_path)
    rank = load_rank(tmp_path, plan_model(tmp_path, CONFIG), CONFIG, lambda _: None).start()
    assert rank.kv_pool is not None
    office = TicketOffice(b"k" * 40, "f", SIZE, "127.0.0.1", 5, lease_s=60.0)
    scheduler, _ = build_scheduler(CONFIG, rank.model.kv, office=office)
    assert scheduler.transfer is not None
    offers, memory = scheduler.transfer.offers, as_block_memory(rank.kv_pool.layer_bytes())
    offered = OfferedBlocks(offers, rank.progress, SIZE, arrays_of_layers(rank))
    request = Request("a", array("i", range(3, 60)), SamplingParams(max_tokens=1), offers_kv=True)
    seen: list[tuple[object, int, list[NDArray[np.uint8]]]] = []
    passed = StepProgress.passed

    def look(progress: StepProgress) -> None:
        passed(progress)
        assert request.offered is not None
        ticket_id = request.offered.request_id
        known, coming = offered.blocks(ticket_id), offered.coming(ticket_id)
        assert known is not None
        assert coming is not None
        assert offered.is_present(coming.step)
        for number in range(len(known), len(coming.blocks)):
            block = coming.blocks[number]
            seen.append((coming.step, number, [array[:, block].copy() for array in memory[: coming.num_arrays]]))

    monkeypatch.setattr(StepProgress, "passed", look)
    scheduler.add(request)
    steps, num_compared = Steps(scheduler, LocalExecutor(rank.runner), rank.depth), 0

    def offer() -> None:
        scheduler.offer_early()

    while steps.advance(offer) is not None:
        scheduler.grow_offers()
        assert request.offered is not None
        blocks = offered.blocks(request.offered.request_id)
        assert blocks is not None
        for step, number, parts in seen:
            assert offered.is_last(step)
            assert not offered.is_present(step)
            for part, whole in zip(parts, memory, strict=False):
                np.testing.assert_array_equal(part, whole[:, blocks[number]])
                num_compared += 1
        seen.clear()
    assert num_compared > 20
    offers.record_fetch(request.offered.request_id, 0.0, is_last=True)
    scheduler.check_idle()
    rank.close()
