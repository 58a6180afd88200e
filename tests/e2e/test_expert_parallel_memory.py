"""Ranks with less memory than experts: the tokens of a rank that holds all of them, whatever is evicted."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache

import pytest

from tests.e2e.test_expert_parallel import REPLICAS, RESTLESS, TWO, complete_all, num_placed_anew
from tests.support.saved_models import saved_model
from tests.support.service import Service, service, wait_until
from tests.support.slot_bytes import slots_on_cpu
from tests.support.tiny_model import write_model_dir


def of_ranks(running: Service, name: str, before: str = "", after: str = "") -> list[float]:
    """A metric of each rank, 0 where it is not exported yet. before, after: labels beside `rank`, in their order."""
    pattern = rf'moeserve_expert_{name}{{{before}rank="(\d)"{after}}} (\S+)'
    found = re.findall(pattern, running.http.get("/metrics").text)
    return [float(dict(found).get(rank, 0)) for rank in "01"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """The answers of a rank that holds all experts; several such ranks give the same (`test_expert_parallel.py`)."""

    @cache
    def texts(case: str) -> list[str]:
        model = tmp_path_factory.mktemp(case)
        write_model_dir(model)
        saved_model(case, model)
        with service(model, tmp_path_factory.mktemp("all")) as everything:
            return [text for text, _ in complete_all(everything)]

    return texts


@pytest.mark.parametrize(
    ("case", "num_slots", "prefetch", "sources", "settings"),
    [
        ("mixtral", 2, "gate", {"gate-early"}, ["--dispatch", "alltoall"]),
        ("mixtral", 2, "affinity", {"affinity"}, ["--dispatch", "allgather", *RESTLESS]),
        pytest.param(
            "qwen3_moe",
            3,
            "off",
            set(),
            ["--dispatch", "allgather", *REPLICAS, *RESTLESS],
            marks=pytest.mark.long,
        ),
        pytest.param(
            "mixtral",
            2,
            "gate",
            {"gate-early"},
            ["--dispatch", "allgather", "--model-impl", "transformers", *RESTLESS],
            marks=pytest.mark.long,
            id="transformers",
        ),
    ],
)
def test_bounded_memory_on_two_ranks_changes_no_token(
    tmp_path_factory: pytest.TempPathFactory,
    whole: Callable[[str], list[str]],
    case: str,
    num_slots: int,
    prefetch: str,
    sources: set[str],
    settings: list[str],
) -> None:
    model = tmp_path_factory.mktemp(case)
    write_model_dir(model)
    saved_model(case, model)
    expected = whole(case)
    store = tmp_path_factory.mktemp("store")
    bounded = ["--expert-memory", str(slots_on_cpu(model, num_slots)), "--expert-store-dir", str(store), *settings]
    bounded += ["--expert-prefetch", prefetch]
    with service(model, tmp_path_factory.mktemp("some"), *TWO, *bounded) as some:
        assert [text for text, _ in complete_all(some)] == expected
        wait_until(lambda: min(of_ranks(some, "evictions_total")) > 10)
        assert min(of_ranks(some, "misses_total")) > 10
        resident = some.http.get("/v1/experts").json()["residency"]["resident"]
        assert len(resident) == 2
        # A layer that was just placed anew holds none until it is used again.
        assert all(len(layer) <= num_slots for of_rank in resident for layer in of_rank)
        assert all(any(of_rank) for of_rank in resident)
        recall = some.http.get("/v1/experts").json().get("recall", [])
        assert [of_rank["sources"].keys() for of_rank in recall] == ([sources] * 2 if sources else [])
        if sources:
            wait_until(lambda: min(of_ranks(some, "prefetch_bytes_total", before='outcome="useful",')) > 0)
        if "--rebalance-interval" in settings:
            while not num_placed_anew(some):
                assert [text for text, _ in complete_all(some)] == expected
        else:
            assert not num_placed_anew(some)
        wait_until(lambda: bool(list(store.glob("*/experts.bin"))))
        # Now out of the expert file, before out of the checkpoint.
        assert [text for text, _ in complete_all(some)] == expected
        some.process.send_signal(signal.SIGTERM)
        assert some.end() == 0
        assert some.leaves_nothing()
    assert len(list(store.glob("*/experts.bin"))) == 1
