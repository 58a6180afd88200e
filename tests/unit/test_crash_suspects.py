"""What a dead engine leaves behind about its last work, and whom the next one suspects."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.life import MemoryKills, is_from_outside
from moeserve.engine.crashes import record as record_module
from moeserve.engine.crashes.judgement import LastWork, suspicion_after
from moeserve.engine.crashes.record import WorkRecord, read_record
from moeserve.engine.crashes.suspects import Suspects, digest_of
from moeserve.plan import Chunk, SamplingParams, StepPlan
from moeserve.wire import Generate, Left, Suspicion, pack_token_ids

NOTHING = LastWork({}, [], {})
LIFE = 3


def chunk(name: str, start: int, count: int = 1) -> Chunk:
    return Chunk(name, array("i", [1] * count), start, array("i"), None)


def generate(name: str, prompt: str = "hello", output: int = 0, **sampling: int) -> Generate:
    """output: the number of tokens that came of it already."""
    params = SamplingParams(**{"max_tokens": 9, **sampling})  # type: ignore[arg-type]
    return Generate(name, pack_token_ids([*prompt.encode()]), params, output_token_ids=pack_token_ids([1] * output))


def left(name: str, prompt: str) -> Left:
    message = generate(name, prompt)
    return Left(name, message.token_ids, message.sampling)


class Engine:
    """The suspects of an engine's life and its record, as the next one reads it."""

    def __init__(self, folder: Path, suspicion: Suspicion | None = None, *, rows: int = 8, max_steps: int = 2) -> None:
        self.path = folder / "work"
        self.path.unlink(missing_ok=True)
        self.suspects = Suspects(WorkRecord(self.path, LIFE, rows, max_steps), suspicion or Suspicion())

    def begin(self, step: int, *chunks: Chunk) -> None:
        self.suspects.begin([StepPlan(step, [*chunks])])

    def take(self, *names: str) -> None:
        for name in names:
            with self.suspects.taking(generate(name)):
                pass

    @property
    def last(self) -> LastWork:
        found = read_record(self.path, LIFE)
        assert found is not None
        return found


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_an_engine_that_has_not_worked_names_nobody(engine: Engine) -> None:
    assert engine.last == NOTHING


def test_the_requests_of_the_step_in_flight_are_named_with_their_places(engine: Engine) -> None:
    engine.begin(1, chunk("a", 0, 5), chunk("b", 7))
    assert engine.last.named == {"a": 5, "b": 8}
    engine.suspects.settle(1)
    assert engine.last == NOTHING
    engine.begin(2, chunk("b", 8))
    assert engine.last.named == {"b": 9}


def test_both_steps_are_named_where_one_is_planned_ahead(engine: Engine) -> None:
    engine.begin(1, chunk("a", 4), chunk("b", 2))
    engine.begin(2, chunk("a", 5), chunk("c", 0, 3))
    assert engine.last.named == {"a": 6, "b": 3, "c": 3}
    engine.suspects.settle(1)
    assert engine.last.named == {"a": 6, "c": 3}
    engine.begin(3, chunk("d", 1))
    assert engine.last.named == {"a": 6, "c": 3, "d": 2}


def test_every_step_in_flight_is_named_where_each_of_several_ranks_computes_another(tmp_path: Path) -> None:
    engine = Engine(tmp_path, max_steps=4)
    engine.take("new")
    for step, name in enumerate("abcdef", 1):
        engine.begin(step, chunk(name, 4))
        engine.suspects.settle(step - 3)
        assert engine.last == LastWork(dict.fromkeys("abcdef"[max(0, step - 3) : step], 5), [], {})
    engine.suspects.settle(5)
    assert engine.last == LastWork({"f": 5}, [], {})


def test_all_ranks_requests_are_named(engine: Engine) -> None:
    engine.suspects.begin([StepPlan(1, [chunk("a", 1)]), StepPlan(1, []), StepPlan(1, [chunk("b", 2)])])
    assert engine.last.named == {"a": 2, "b": 3}


def test_a_part_that_is_computed_again_takes_the_place_of_its_step(engine: Engine) -> None:
    engine.begin(1, chunk("a", 1), chunk("b", 1))
    engine.begin(1, chunk("b", 1))
    assert engine.last.named == {"b": 2}


def test_a_request_is_named_while_it_is_taken(engine: Engine) -> None:
    engine.take("a")
    assert engine.last == NOTHING
    with pytest.raises(KeyError), engine.suspects.taking(generate("b")):
        raise KeyError
    assert engine.last.named == {"b": 0}


def test_the_record_survives_the_kill_of_its_writer(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from moeserve.engine.crashes.record import WorkRecord
record = WorkRecord(Path({str(tmp_path / "work")!r}), {LIFE}, 8)
record.begin_step(1, ["a", "b"], [4, 5], None)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    found = read_record(tmp_path / "work", LIFE)
    assert found is not None
    assert found.named == {"a": 4, "b": 5}


def test_wherever_a_write_is_cut_off_the_record_names_the_step_before_or_nobody(engine: Engine) -> None:
    engine.begin(1, chunk("a", 4), chunk("b", 2))
    whole_before = engine.path.read_bytes()
    engine.begin(2, chunk("c", 9), chunk("d", 3, 7))
    whole = engine.path.read_bytes()
    changed = [place for place in range(len(whole)) if whole[place] != whole_before[place]]
    for place in range(changed[0], changed[-1] + 1):
        engine.path.write_bytes(whole[:place] + whole_before[place:])
        assert engine.last.named == {"a": 5, "b": 3}


def test_a_step_that_is_overwritten_is_named_wholly_or_not_at_all(engine: Engine) -> None:
    engine.begin(1, chunk("a", 4), chunk("b", 2))
    before = engine.path.read_bytes()
    engine.suspects.settle(1)
    engine.begin(3, chunk("c", 9), chunk("d", 3, 7))
    whole = engine.path.read_bytes()
    # Its number that is done with is written first.
    settled = whole[: record_module._SLOTS] + before[record_module._SLOTS :]
    for place in range(record_module._SLOTS, len(whole)):
        engine.path.write_bytes(whole[:place] + settled[place:])
        assert engine.last.named in ({}, {"c": 10, "d": 10})


def test_a_foreign_or_broken_file_is_no_record(engine: Engine, tmp_path: Path) -> None:
    engine.begin(1, chunk("a", 4))
    assert read_record(engine.path, LIFE + 1) is None
    assert read_record(tmp_path / "none", LIFE) is None
    whole = engine.path.read_bytes()
    for other in (b"", b"moework", whole[:-1], whole[:40], b"\0" * len(whole), b"x" + whole[1:]):
        engine.path.write_bytes(other)
        assert read_record(engine.path, LIFE) is None


def test_more_requests_than_there_is_room_for_are_cut_and_touch_nothing_else(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Suspicion({"s": 3}), rows=2)
    engine.begin(1, *(chunk(f"{'long name' * 20}{n}", n) for n in range(40)))
    assert 0 < len(engine.last.named) < 40
    assert engine.last.suspects == {"s": 3}
    engine.take("s" * 10_000)
    assert engine.last.suspects == {"s": 3}


def test_without_room_on_the_disk_nothing_is_recorded_and_the_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    suspects = Suspects(WorkRecord(tmp_path / "work", LIFE, 8), Suspicion({"a": 1}))
    suspects.begin([StepPlan(1, [chunk("b", 1)])])
    assert not (tmp_path / "work").exists()
    assert read_record(tmp_path / "work", LIFE) is None


def test_a_suspect_passes_behind_its_place_and_is_forgotten(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Suspicion({"a": 6, "b": 4}))
    engine.take("a", "b", "c")
    assert [engine.suspects.until(name) for name in "abc"] == [7, 5, 0]
    engine.begin(1, chunk("a", 0, 6), chunk("c", 3))
    assert [name for name, _ in engine.last.trials] == ["a"]
    engine.suspects.settle(1)
    # As far as it was, and not yet beyond.
    assert engine.last.suspects == {"a": 6, "b": 4}
    engine.begin(2, chunk("a", 6))
    engine.suspects.settle(2)
    assert engine.last.suspects == {"b": 4}
    assert engine.suspects.until("a") == 0
    engine.begin(3, chunk("a", 7), chunk("c", 4))
    assert engine.last.trials == []


@pytest.mark.parametrize(
    ("place", "output", "passes_with"),
    [
        # It died in its prompt of 5 tokens, or with the first token behind it.
        (3, 0, 4),
        (5, 0, 6),
        # It was decoding; of its last tokens some were not heard of, or it has gone on since.
        (9, 4, 10),
        (9, 2, 10),
        (9, 7, 13),
    ],
)
def test_a_suspect_that_was_decoding_passes_with_a_decode_step(
    tmp_path: Path, place: int, output: int, passes_with: int
) -> None:
    engine = Engine(tmp_path, Suspicion({"a": place}))
    with engine.suspects.taking(generate("a", output=output)):
        assert engine.suspects.until("a") == passes_with


def test_work_is_known_again_under_another_seed_and_id_alone() -> None:
    digest = digest_of(generate("a", seed=1))
    assert digest == digest_of(generate("b", seed=2))
    others = [generate("a", "other"), generate("a", top_k=3), generate("a", max_tokens=10)]
    assert digest not in {digest_of(other) for other in others}


def test_a_culprit_is_refused_for_its_time(tmp_path: Path) -> None:
    engine = Engine(tmp_path, Suspicion(culprits=((digest_of(generate("a")), 100.0),)))
    assert engine.suspects.is_culprit(generate("b", seed=5), 99.0)
    assert not engine.suspects.is_culprit(generate("b"), 100.0)
    assert not engine.suspects.is_culprit(generate("a", "other"), 99.0)


# The judgement.


def after(before: Suspicion, last: LastWork | None, *, from_outside: bool = False, now: float = 10.0) -> Suspicion:
    return suspicion_after(before, last, from_outside=from_outside, now=now)


def test_only_requests_of_the_last_steps_are_suspected() -> None:
    assert after(Suspicion(), LastWork({"a": 3, "b": 5}, [], {})) == Suspicion({"a": 3, "b": 5})
    assert after(Suspicion(), NOTHING) == Suspicion()


def test_an_end_from_outside_makes_no_suspect_and_clears_none() -> None:
    last = LastWork({"a": 3, "s": 4}, [("s", "digest")], {"s": 3, "t": 2})
    assert after(Suspicion({"s": 3, "t": 2, "passed": 9}), last, from_outside=True) == Suspicion({"s": 3, "t": 2})


def test_the_suspect_on_trial_is_the_culprit_and_nobody_beside_it_is_suspected() -> None:
    last = LastWork({"a": 3, "s": 4}, [("s", "digest")], {"s": 3, "t": 2})
    assert after(Suspicion({"s": 3, "t": 2}), last) == Suspicion({"t": 2}, (("digest", 100.0),))


def test_a_death_without_a_suspect_in_the_step_makes_new_ones() -> None:
    last = LastWork({"a": 3}, [], {"t": 2})
    assert after(Suspicion({"s": 3, "t": 2}), last) == Suspicion({"a": 3, "t": 2})


def test_a_request_that_has_passed_while_its_last_trial_was_in_flight_is_no_culprit() -> None:
    last = LastWork({"s": 9, "t": 2}, [("s", "of s"), ("t", "of t")], {"t": 2})
    assert after(Suspicion({"s": 3, "t": 2}), last).culprits == (("of t", 100.0),)


def test_an_engine_that_dies_before_it_works_changes_nothing() -> None:
    before = Suspicion({"s": 3}, (("old", 9.0), ("young", 11.0)))
    assert after(before, None) == Suspicion({"s": 3}, (("young", 11.0),))


def test_the_newest_culprits_are_remembered() -> None:
    before = Suspicion({}, tuple((str(n), 50.0) for n in range(16)))
    found = after(before, LastWork({"s": 4}, [("s", "new")], {"s": 3})).culprits
    assert [digest for digest, _ in found] == [*map(str, range(1, 16)), "new"]


@pytest.mark.parametrize("killed_in_step", range(1, 9))
def test_a_fatal_request_costs_two_engines_whatever_kills_come_between(tmp_path: Path, killed_in_step: int) -> None:
    """Every second engine is killed. A decode step of `bad` behind six tokens ends it; as a prompt it harms nobody."""
    suspicion, num_ended, has_served = Suspicion(), 0, False
    known = dict.fromkeys(("a", "bad", "b", "c"), 4)
    for life in range(6):
        engine = Engine(tmp_path, suspicion)
        names = [name for name in known if not engine.suspects.is_culprit(generate(name, name), 1.0)]
        for name in names:
            with engine.suspects.taking(generate(name, name, known[name] - len(name))):
                pass
        computed = dict.fromkeys(names, 0)
        from_outside = False
        for step in range(1, 20):
            suspects = [name for name in names if engine.suspects.until(name)]
            planned = [name for name in names if name not in suspects[1:]]
            engine.begin(step, *(chunk(name, computed[name], known[name] - computed[name]) for name in planned))
            from_outside = life % 2 == 1 and step == killed_in_step
            if from_outside or ("bad" in planned and computed["bad"] >= 6):
                break
            for name in planned:
                computed[name] = known[name]
                known[name] += 1
            engine.suspects.settle(step)
        else:
            has_served = True
            break
        num_ended += not from_outside
        suspicion = suspicion_after(suspicion, engine.last, from_outside=from_outside, now=0.0)
    assert has_served
    assert num_ended == 2
    assert [digest for digest, _ in suspicion.culprits] == [digest_of(generate("bad", "bad"))]


@pytest.mark.parametrize("num_clients", [1, 2])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_fatal_request_costs_two_engines_though_its_client_leaves_and_sends_it_again(
    tmp_path: Path, num_clients: int, is_killed: bool
) -> None:
    """A step with it ends the engine. It has another id each time. is_killed: the second engine ends before that."""
    suspicion, num_ended = Suspicion(), 0
    for life in range(8):
        engine = Engine(tmp_path, suspicion)
        if life:
            for number in range(num_clients):
                engine.suspects.record_left(left(f"bad {life - 1} {number}", "bad"))
        bad = [f"bad {life} {number}" for number in range(num_clients)]
        if engine.suspects.is_culprit(generate(bad[0], "bad"), 1.0):
            break
        for name in bad:
            with engine.suspects.taking(generate(name, "bad")):
                pass
        engine.take("other")
        from_outside = is_killed and life == 1
        suspects = [name for name in (*bad, "other") if engine.suspects.until(name)]
        planned = ["other"] if from_outside else [name for name in (*bad, "other") if name not in suspects[1:]]
        engine.begin(1, *(chunk(name, 0, 3) for name in planned))
        num_ended += not from_outside
        suspicion = suspicion_after(suspicion, engine.last, from_outside=from_outside, now=0.0)
    assert num_ended == 2
    assert [digest for digest, _ in suspicion.culprits] == [digest_of(generate("bad", "bad"))]


@pytest.mark.parametrize("when", ["while it waits", "in its step"])
def test_a_fatal_request_is_found_out_though_its_client_leaves_once_the_next_engine_has_it(
    tmp_path: Path, when: str
) -> None:
    engine = Engine(tmp_path, Suspicion({"bad": 5, "other": 5}))
    engine.take("bad")
    if when == "in its step":
        engine.begin(1, chunk("bad", 0, 5))
    engine.suspects.record_abort("bad")
    engine.suspects.record_abort("unknown")
    if when == "while it waits":
        engine.take("again")
        engine.begin(1, chunk("again", 0, 5))
    assert after(Suspicion(), engine.last) == Suspicion({"other": 5}, ((digest_of(generate("bad")), 100.0),))


def test_whoever_sends_the_work_of_an_innocent_whose_client_left_passes_and_nobody_is_suspected_then(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, Suspicion({"a": 5}))
    engine.suspects.record_left(left("a", "hello"))
    engine.suspects.record_left(left("b", "other"))
    assert [*engine.last.suspects] == [f"work {digest_of(generate('c'))}"]
    engine.take("c", "d")
    engine.begin(1, chunk("c", 0, 5))
    engine.suspects.settle(1)
    engine.begin(2, chunk("c", 5))
    engine.suspects.settle(2)
    assert engine.last.suspects == {}
    engine.take("e")
    assert [engine.suspects.until(name) for name in "cde"] == [0, 0, 0]
    engine.begin(3, chunk("d", 0, 5), chunk("e", 0, 5))
    assert engine.last.trials == []


# Where a death came from.


@pytest.mark.parametrize(
    ("code", "was_stopped", "out_of_memory", "expected"),
    [
        (-signal.SIGKILL, False, False, True),
        (-signal.SIGKILL, False, True, False),
        (-signal.SIGTERM, False, True, True),
        (0, False, True, True),
        (-signal.SIGSEGV, False, False, False),
        (-signal.SIGABRT, False, False, False),
        (-signal.SIGBUS, False, False, False),
        (3, False, False, False),
        (None, False, False, False),
        (None, True, True, True),
        (3, True, True, True),
    ],
)
def test_what_no_request_can_do_comes_from_outside(
    code: int | None, was_stopped: bool, out_of_memory: bool, expected: bool
) -> None:
    assert is_from_outside(code, was_stopped=was_stopped, out_of_memory=out_of_memory) is expected


def test_kills_for_lack_of_memory_count_since_the_process_was_last_seen_alive(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 12\noom_kill 3\n")
    kills = MemoryKills(vmstat)
    assert not kills.may_have_come()
    vmstat.write_text("nr_free_pages 12\noom_kill 4\n")
    assert kills.may_have_come()
    # A sign of life may be from before.
    kills.record_alive()
    assert kills.may_have_come()
    kills.record_alive()
    assert not kills.may_have_come()


def test_where_the_kernel_does_not_tell_memory_may_have_been_short(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path / "none").may_have_come()
    (tmp_path / "other").write_text("nr_free_pages 12\n")
    assert MemoryKills(tmp_path / "other").may_have_come()


def test_a_record_is_private_and_small(tmp_path: Path) -> None:
    WorkRecord(tmp_path / "work", LIFE, 1024)
    state = (tmp_path / "work").stat()
    assert state.st_mode & 0o777 == 0o600
    assert state.st_size < 400 * 1024
    assert state.st_blocks * 512 >= state.st_size // mmap.PAGESIZE * mmap.PAGESIZE


def test_suspicion_travels_in_the_context(tmp_path: Path) -> None:
    from moeserve.config import ServeConfig
    from moeserve.run_context import RunContext, load_run_context

    suspicion = Suspicion({"a": 3}, (("digest", 12.5),))
    context = RunContext(
        config=ServeConfig(),
        model_dir="none",
        model_hash="none",
        run_dir=str(tmp_path),
        incarnation=1,
        secret="00",
        served_model_names=("none",),
    )
    assert load_run_context(replace(context, suspicion=suspicion).save()).suspicion == suspicion
