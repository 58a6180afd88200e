"""A rank that takes long to start on a busy machine: the others wait for it as long as it shows life."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from moeserve.config import ServeConfig
from moeserve.engine import ranked_service
from moeserve.engine.ranked_service import serve_member
from moeserve.engine.ranks import transport
from moeserve.engine.ranks.meeting import Meeting
from moeserve.engine.ranks.messages import Joined, Loaded, RankBeat, RankError, Shutdown
from moeserve.engine.ranks.transport import RankHub, RankLink
from moeserve.engine.service import LoadedPart
from moeserve.run_context import RunContext

NUM_BEATS = 3  # one every 0.2 s: longer than ranks wait for each other in a step
CONFIG = ServeConfig(expert_parallel_size=2, engine_timeout=1.0, threads=1)


@dataclass
class Ends:
    """Rank 0's end and rank 1's, and a clock that stands still unless it is moved."""

    hub: RankHub
    link: RankLink
    now: float = 0.0


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    meeting = Meeting(
        incarnation=1,
        results=f"ipc://{tmp_path}/results",
        steps=(f"ipc://{tmp_path}/steps",),
        collectives=None,
        interface="lo",
    )
    with zmq.Context() as context:
        both = Ends(RankHub(context, meeting), RankLink(context, meeting, 1))
        monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: both.now, sleep=lambda _: None))
        both.link.send(Joined(1, 1, "name", "here", "software", "model"))
        both.hub.gather(Joined, within=1.0, patience=1.0)
        yield both
        both.hub.close()
        both.link.close()


def test_signs_of_life_that_came_while_rank_0_was_busy_count_however_late_they_are_read(ends: Ends) -> None:
    ends.now = 1000.0
    for message in (RankBeat(1, 0), Loaded(1)):
        ends.link.send(message)
    assert ends.hub.gather(Loaded, within=float("inf"), patience=1.0) == {1: Loaded(1)}


def test_a_rank_loads_for_any_time_while_it_shows_life_and_is_named_once_it_does_not(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, num_beats = ends.hub.receive, 0

    def beating(timeout: float) -> Any:
        # A beat every 0.9 s, twenty times; then silence.
        nonlocal num_beats
        ends.now += 0.9
        if num_beats < 20:
            num_beats += 1
            ends.link.send(RankBeat(1, 0))
            while (beat := receive(1.0)) is None:
                continue
            assert isinstance(beat, RankBeat)
        return None

    monkeypatch.setattr(ends.hub, "receive", beating)
    with pytest.raises(RankError, match=r"Rank 1 \(process 1\) is lost or hung"):
        ends.hub.gather(Loaded, within=float("inf"), patience=1.0)
    assert num_beats == 20
    assert ends.now == pytest.approx(22 * 0.9)


class SlowStart:
    """The lives of two ranks in threads; rank 1 needs longer to start than ranks wait in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._go_on = threading.Event()
        self._num_beats = 0
        receive = RankHub.receive

        def counting(hub: RankHub, timeout: float) -> Any:
            message = receive(hub, timeout)
            if isinstance(message, RankBeat):
                self._num_beats += 1
                if self._num_beats == NUM_BEATS:
                    self._go_on.set()
            return message

        monkeypatch.setattr(RankHub, "receive", counting)
        monkeypatch.setattr(ranked_service.signal, "signal", lambda *_: None)
        monkeypatch.setattr(ranked_service, "plan_recording", lambda *_: None)
        monkeypatch.setattr(ranked_service, "_start", self._start)
        monkeypatch.setattr(ranked_service, "_over_experts", lambda _config, _rank, hub, _recording: hub)
        monkeypatch.setattr(ranked_service, "serve", self._serve)

    def _start(self, meeting: Meeting, member: LoadedPart) -> Any:
        if member.number == 1:
            assert self._go_on.wait(60)
        self.log.append(f"rank {member.number} has started")
        return SimpleNamespace(
            migrator=0, group=0, runner=None, begin_step=None, memory_stats=lambda: None, close=lambda: None
        )

    def _serve(self, context: RunContext, rank: Any, hub: RankHub, *_: Any) -> None:
        self.log.append("requests are taken")
        self._go_on.set()
        hub.send_all(Shutdown())

    def run(self, context: RunContext) -> None:
        collectives = SimpleNamespace(num_entered=0)
        group, progress = SimpleNamespace(collectives=collectives), SimpleNamespace(count=lambda: 0)
        rank = SimpleNamespace(collectives=collectives, group=group, progress=progress, memory_stats=lambda: None)
        members = [LoadedPart(number, CONFIG, cast("Any", None), cast("Any", rank), False, 1) for number in (0, 1)]
        lives = [threading.Thread(target=serve_member, args=(context, one, lambda _: None)) for one in members]
        for life in lives:
            life.start()
        for life in lives:
            life.join()


def test_requests_are_taken_once_a_rank_that_is_slow_to_start_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    context = RunContext(
        config=CONFIG,
        model_dir=str(tmp_path),
        model_hash="0123456789abcdef",
        run_dir=str(run_dir),
        incarnation=1,
        secret="5e" * 32,
        served_model_names=("m",),
    )
    slow = SlowStart(monkeypatch)
    slow.run(context)
    assert slow.log == ["rank 0 has started", "rank 1 has started", "requests are taken"]
