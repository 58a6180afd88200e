"""Serving with fewer slots than experts: the same bits, whatever is evicted and whenever, and clear words otherwise."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import moeserve.engine.experts.memory
import moeserve.model.expert_store
from benchmarks.token_engine import Completion, TokenEngine
from experts.errors import ExpertStoreError
from experts.memory.eviction import POLICIES
from experts.memory.file import PAGE_BYTES, round_to_page
from experts.moe_layer import MoeLayer
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import save_statistics
from experts.routing.predictors import RecallSample
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.settings import statistics_key
from moeserve.engine.memory_plan import read_spec
from moeserve.model.expert_store import ExpertFile, ExpertPacker, layouts_in_store, layouts_of, stored_experts
from moeserve.model.expert_weights import packed_experts
from moeserve.model.spec import ModelError, silent
from moeserve.plan import SamplingParams
from tests.support.expert_files import wait_until_written
from tests.support.tiny_models import CASES, build, save

BASE = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=160, max_num_batched_tokens=64)
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=3)
RANDOM = SamplingParams(max_tokens=10, temperature=1.3, seed=5, logprobs=2)


class RandomEviction:
    """A policy that knows nothing."""

    def __init__(self, num_experts: int) -> None:
        self._random = random.Random(num_experts)

    def touch(self, experts: object) -> None:
        """Nothing is remembered."""

    def worth(self, expert: int) -> tuple[float, float]:
        return self._random.random(), 0.0


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("mixtral")
    save("mixtral", directory)
    return directory


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(1, 128) for _ in range(count)] for count in (40, 5, 90)]


def generate(llm: TokenEngine) -> list[Completion]:
    """One after the other and then all at once, so that events are small and large."""
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts()]
    return alone + llm.generate(prompts(), RANDOM)


def bits(completions: list[Completion]) -> list[tuple[object, object]]:
    return [(one.token_ids, one.logprobs) for one in completions]


def wait_for_prefetches(llm: TokenEngine) -> None:
    """Generates until a prefetch has begun before its demand load came, which is up to the thread that copies."""
    assert llm.experts is not None
    for _ in range(20):
        if llm.experts.stats().counters.prefetch_bytes:
            return
        generate(llm)


def slot_bytes(directory: Path) -> int:
    return round_to_page(layouts_in_store(directory, *read_spec(directory, BASE)).num_bytes)


def config_for(directory: Path, num_slots: int, store: Path, **changes: object) -> ServeConfig:
    """Settings that pay for `num_slots` in each layer with experts."""
    spec, _ = read_spec(directory, BASE)
    size = num_slots * len(spec.moe_layers) * slot_bytes(directory)
    return replace(BASE, expert_memory=size, expert_store_dir=str(store), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "num_slots", "prefetch", "sources"),
    [
        ("mixtral", 2, "off", set()),
        ("gpt_oss", 4, "gate", {"gate-early"}),
        ("glm4_moe", 3, "gate", {"gate-shared"}),
        ("qwen3_moe", 5, "affinity", {"affinity"}),
        ("glm4_moe", 3, "affinity", {"affinity"}),
    ],
)
def test_random_eviction_and_prefetches_change_no_bit(
    case: str, num_slots: int, prefetch: str, sources: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tmp_path / "model"
    save(case, model_dir)
    monkeypatch.setitem(POLICIES, "lfru", RandomEviction)
    monkeypatch.setattr(RecallSample, "is_counting", True)
    llm = TokenEngine(model_dir, config_for(model_dir, num_slots, tmp_path / "store", expert_prefetch=prefetch))
    whole = bits(generate(TokenEngine(model_dir, BASE)))
    for _ in range(2):
        # The first time out of the checkpoint, while the expert file is written.
        assert bits(generate(llm)) == whole
        wait_until_written()
    assert llm.experts is not None
    if prefetch != "off":
        wait_for_prefetches(llm)
    stats = llm.experts.stats()
    llm.close()
    assert stats.counters.num_evictions > 50
    assert stats.counters.demand_bytes == stats.counters.num_misses * slot_bytes(model_dir)
    assert (stats.counters.prefetch_bytes > 0) == (prefetch != "off")
    assert (stats.predictor_seconds > 0) == (prefetch != "off")
    assert {count.source for count in stats.recall} == sources
    assert all(0 <= count.num_recalled <= count.num_chosen > 0 for count in stats.recall)
    assert all(len(layer) <= num_slots for layer in stats.resident)
    assert stats.stall_seconds > 0


@pytest.mark.parametrize("prefetch", ["auto", "affinity"])
def test_a_model_with_one_layer_of_experts_serves_from_slots(
    prefetch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "one layer", ("Mixtral", {"num_local_experts": 8, "num_hidden_layers": 1}))
    save("one layer", tmp_path / "model")
    llm = TokenEngine(
        tmp_path / "model", config_for(tmp_path / "model", 2, tmp_path / "store", expert_prefetch=prefetch)
    )
    assert bits(generate(llm)) == bits(generate(TokenEngine(tmp_path / "model", BASE)))
    llm.close()


@pytest.mark.parametrize("given", ["nothing", "enough"])
def test_nothing_of_it_is_built_where_all_experts_fit(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("built")

    for name in ("ExpertMemory", "SlotArena", "ResidentExperts", "ExpertFile"):
        monkeypatch.setattr(moeserve.engine.experts.memory, name, refuse)
    dispatches: list[object] = []
    init = MoeLayer.__init__
    monkeypatch.setattr(
        MoeLayer,
        "__init__",
        lambda *args, **options: (dispatches.append(options["dispatch"]), init(*args, **options))[1],
    )
    llm = TokenEngine(small_model, BASE if given == "nothing" else config_for(small_model, 8, tmp_path))
    assert llm.experts is None
    assert dispatches == [None] * 3
    with pytest.raises(AssertionError, match="built"):
        TokenEngine(small_model, config_for(small_model, 7, tmp_path))


def test_too_little_memory_for_the_experts_of_a_token_is_refused_with_the_numbers(
    small_model: Path, tmp_path: Path
) -> None:
    least = 3 * 2 * slot_bytes(small_model)
    TokenEngine(small_model, replace(BASE, expert_memory=least, expert_store_dir=str(tmp_path))).close()
    with pytest.raises(
        ConfigError, match=r"431\.9 KiB holds 5 experts of 72 KiB, but 3 layers need 2 each: give at least 432 KiB"
    ):
        TokenEngine(small_model, replace(BASE, expert_memory=least - 1, expert_store_dir=str(tmp_path)))


def write_file(directory: Path, config: ServeConfig) -> None:
    """Serve until the expert file is there."""
    engine = TokenEngine(directory, config)
    wait_until_written()
    engine.close()


def test_a_start_does_not_wait_for_its_expert_file(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = moeserve.model.expert_store.write_expert_file

    def wait_and_write(*args: Any, **options: Any) -> None:
        assert may_write.wait(60)
        write(*args, **options)

    monkeypatch.setattr(moeserve.model.expert_store, "write_expert_file", wait_and_write)
    llm = TokenEngine(small_model, config_for(small_model, 3, tmp_path))
    expected = bits(generate(TokenEngine(small_model, BASE)))
    assert bits(generate(llm)) == expected
    assert not list(tmp_path.glob("*/experts.bin"))
    may_write.set()
    wait_until_written()
    # From now on experts come out of the file.
    monkeypatch.setattr(ExpertPacker, "__call__", partial(pytest.fail, "packed once more"))
    assert bits(generate(llm)) == expected
    llm.close()


def test_no_expert_file_is_made_of_a_checkpoint_that_changes_while_it_is_written(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    save("mixtral", model)
    spec, dtype = read_spec(model, BASE)
    assert spec.moe is not None
    stored = stored_experts(model, spec, dtype)
    layouts, count = layouts_of(stored), spec.moe.num_experts

    def change_in_between() -> Iterator[torch.Tensor]:
        experts = ExpertPacker(stored, layouts).all(count)
        yield next(experts)
        (model / "model.safetensors").touch()
        yield from experts

    with pytest.raises(ExpertStoreError, match=r"model\.safetensors was changed"):
        ExpertFile(model, stored, count, layouts, store).ensure(silent, change_in_between())
    assert not list(store.glob("*/*"))


def test_threads_that_pack_experts_at_once_write_the_bytes_of_the_expert_file(tmp_path: Path) -> None:
    """Of a checkpoint in more files than a reader keeps open."""
    build("mixtral").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    spec, dtype = read_spec(tmp_path, BASE)
    assert spec.moe is not None
    stored = stored_experts(tmp_path, spec, dtype)
    layouts = layouts_of(stored)
    packer, count = ExpertPacker(stored, layouts), spec.moe.num_experts
    wanted = list(packed_experts(stored, layouts, silent))
    assert all(map(torch.equal, packer.all(count), wanted))

    def pack(place: int) -> bool:
        out = torch.empty(layouts.num_bytes, dtype=torch.uint8)
        packer(*divmod(place, count), out)
        return torch.equal(out, wanted[place])

    places = random.Random(1).choices(range(len(wanted)), k=200)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(pack, places))


def test_a_store_is_kept_and_one_of_other_weights_gets_its_own(small_model: Path, tmp_path: Path) -> None:
    shutil.copytree(small_model, model := tmp_path / "model")
    config = config_for(model, 3, tmp_path / "store")

    def files() -> dict[str, int]:
        write_file(model, config)
        return {str(path.parent.name): path.stat().st_ino for path in tmp_path.glob("store/*/experts.bin")}

    first = files()
    assert len(first) == 1
    assert files() == first
    os.utime(model / "model.safetensors", ns=(0, 1))
    assert files() == first
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-9, os.SEEK_END)
        weights.write(b"???")
    assert len(files()) == 2


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(PAGE_BYTES))


def _spoil(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"?")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, r"experts\.bin has \d+ bytes"),
        (_grow, r"experts\.bin has \d+ bytes"),
        (lambda path: _spoil(path, 0), r"experts\.bin .*sha256"),
        (lambda path: _spoil(path, path.stat().st_size // 2), r"experts\.bin .*sha256"),
        (lambda path: (path.parent / "manifest.json").unlink(), r"has no readable manifest\.json"),
        (lambda path: _cut(path.parent / "manifest.json"), r"manifest\.json is not a manifest"),
    ],
    ids=["cut", "grown", "header", "expert", "no manifest", "torn manifest"],
)
def test_a_damaged_store_is_refused_until_it_is_deleted(
    small_model: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    config = config_for(small_model, 3, tmp_path)
    write_file(small_model, config)
    (path,) = tmp_path.glob("*/experts.bin")
    whole = path.read_bytes()
    damage(path)
    for _ in range(2):
        with pytest.raises(ModelError, match=words + r".*: delete .*experts\.bin"):
            TokenEngine(small_model, config)
    path.unlink()
    write_file(small_model, config)
    assert path.read_bytes() == whole


def test_a_store_that_cannot_be_written_is_one_warning_and_experts_come_out_of_the_checkpoint(
    small_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with capture_logs() as logs:
        llm = TokenEngine(small_model, config_for(small_model, 3, tmp_path / "file"))
        wait_until_written()
        assert bits(generate(llm)) == bits(generate(TokenEngine(small_model, BASE)))
        llm.close()
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert line["event"] == "expert_file_not_written"
    assert "--expert-store-dir" in line["reason"]


def test_an_expert_that_lost_its_checksum_fails_the_step_and_all_later_ones(small_model: Path, tmp_path: Path) -> None:
    config = config_for(small_model, 3, tmp_path)
    write_file(small_model, config)
    (path,) = tmp_path.glob("*/experts.bin")
    memory = TokenEngine(small_model, config)
    assert memory.experts is not None
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ExpertStoreError, match="lost its checksum"):
            generate(memory)
    memory.close()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = ServeConfig(expert_memory=1 << 30)
    unused = partial(pytest.fail, "nothing is looked up")
    with pytest.raises(ConfigError, match="--expert-memory: a llama model has no experts"):
        moeserve.engine.experts.memory.plan_residency(unused, *read_spec(tmp_path, config), config, None)


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru", "static", "affinity"])
def test_every_policy_gives_the_same_answers(small_model: Path, tmp_path: Path, policy: str) -> None:
    spec, _ = read_spec(small_model, BASE)
    assert spec.moe is not None
    statistics = RoutingStatistics(StatisticsSpec(len(spec.moe_layers), spec.moe.num_experts, spec.moe.gate.top_k))
    file = tmp_path / "statistics.safetensors"
    save_statistics(file, statistics, statistics_key(small_model))
    prefetch = "affinity" if policy == "affinity" else "off"
    config = config_for(small_model, 3, tmp_path / "store", expert_policy=policy, expert_prefetch=prefetch)
    llm = TokenEngine(small_model, replace(config, expert_statistics=str(file)))
    assert bits(generate(llm)) == bits(generate(TokenEngine(small_model, BASE)))
    assert llm.experts is not None
    assert llm.experts.stats().counters.num_evictions > 0
    llm.close()


def test_a_static_policy_refuses_the_statistics_of_another_model(small_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    save_statistics(file, RoutingStatistics(StatisticsSpec(2, 4, 2)), "another")
    config = config_for(small_model, 3, tmp_path / "store", expert_policy="static", expert_statistics=str(file))
    with pytest.raises(ConfigError, match=r"statistics\.safetensors"):
        TokenEngine(small_model, config)
