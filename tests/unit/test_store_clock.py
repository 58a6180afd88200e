"""The store's clock: what is kept is as old as it is, whatever the machine's clock is set to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeserve.frontend.store.clock import Clock, Instant, boot_id, instant
from moeserve.frontend.store.file import connect, prepare
from moeserve.frontend.store.store import Bounds, Store, drop_old

DAY_S = 86_400.0
BOUNDS = Bounds(2**20, 30 * DAY_S)


class Machine:
    """A machine whose clock can be set."""

    def __init__(self) -> None:
        self.wall, self.steady, self.boot = 1e9, 50.0, "first"

    def now(self) -> Instant:
        return Instant(self.wall, self.steady)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def boot_again(self) -> None:
        self.steady, self.boot = 5.0, "next"


@pytest.fixture
def machine() -> Machine:
    return Machine()


@contextmanager
def clock_of(path: Path, machine: Machine) -> Iterator[Clock]:
    prepare(path)
    db = connect(path)
    clock = Clock.of(db, machine.now(), machine.boot)
    yield clock
    clock.note(db, machine.now())
    db.close()


@pytest.mark.parametrize("days", [31, -31])
def test_a_clock_that_is_set_drops_nothing_and_leaves_the_order_of_use(
    tmp_path: Path, machine: Machine, days: float
) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", BOUNDS, machine.now)
        await store.start()
        await store.write(b"", lambda shelf: shelf.add("old", 1))
        machine.wall += days * DAY_S
        machine.wait(1)
        await store.write(b"", lambda shelf: shelf.add("new", 1))
        assert not await store.write(b"", drop_old)
        assert await store.read(b"", lambda shelf: [shelf.has("old"), shelf.date]) == [True, int(machine.wall)]
        order = await store.read(b"", lambda shelf: shelf.db.execute("SELECT id FROM kept ORDER BY used").fetchall())
        assert order == [("old",), ("new",)]
        machine.wait(31 * DAY_S)
        await store.write(b"", drop_old)
        assert not await store.read(b"", lambda shelf: shelf.has("new"))
        await store.stop()

    asyncio.run(run())


def test_processes_that_begin_before_and_after_the_clock_was_set_have_one_time(
    tmp_path: Path, machine: Machine
) -> None:
    with clock_of(tmp_path / "store", machine) as before:
        machine.wall += 31 * DAY_S
        with clock_of(tmp_path / "store", machine) as after:
            assert before.time(machine.now()) == after.time(machine.now()) == 1e9


@pytest.mark.parametrize("days", [31, -31])
def test_the_time_goes_on_after_a_boot_though_the_clock_was_set_before(
    tmp_path: Path, machine: Machine, days: float
) -> None:
    with clock_of(tmp_path / "store", machine):
        machine.wall += days * DAY_S
    machine.boot_again()
    machine.wall += 60.0
    with clock_of(tmp_path / "store", machine) as clock:
        assert clock.time(machine.now()) == pytest.approx(1e9 + 60)


def test_a_clock_that_stands_back_after_a_boot_makes_nothing_younger_than_it_is(
    tmp_path: Path, machine: Machine
) -> None:
    with clock_of(tmp_path / "store", machine):
        db = connect(tmp_path / "store")
        db.execute("INSERT INTO kept(id, caller, size, used) VALUES ('a', x'', 1, ?)", (machine.wall,))
        db.close()
    machine.boot_again()
    machine.wall = 0.0
    with clock_of(tmp_path / "store", machine) as clock:
        assert clock.time(machine.now()) == 1e9


def test_the_machine_tells_its_boot_and_seconds_that_nobody_sets() -> None:
    assert len(boot_id()) > 30
    assert instant().steady > 0
