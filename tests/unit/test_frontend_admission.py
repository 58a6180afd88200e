"""The requests that a frontend takes in, their terms, and its refusals."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ConfigError
from moeserve.frontend.admission import Admission, read_terms
from moeserve.frontend.errors import ApiError
from moeserve.frontend.key_file import ADMIN, USER, Rights
from moeserve.frontend.keys import ANYONE, Identity, load_keys
from moeserve.plan import Terms
from moeserve.scheduling.pacing import Backlog, Load, Slo
from tests.support.refusals import refused

ANY, A, B = Terms(), Terms("a"), Terms("b")
SECRET = "5e" * 32
SERVICE = Slo(2.0, 0.1, 30.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None, jitter: float = 0.0) -> tuple[Admission, Counter[str]]:
    rejections: Counter[str] = Counter()
    return Admission(rejections, lambda: jitter, clock or Clock()), rejections


def load(limit_s: float, **tenants: Backlog) -> Load:
    """16 tokens of prompts a second, a place every second, and 8 places."""
    return Load(100.0, limit_s, 1.0, 16, 8, 1.0, 16, tenants)


def answer_to(admission: Admission, num_choices: int, capacity: int, terms: Terms = ANY) -> ApiError:
    with pytest.raises(ApiError) as caught, admission.hold(num_choices, capacity, terms):
        pytest.fail("it was taken in")
    return caught.value


def test_choices_are_counted_and_those_too_many_now_are_refused() -> None:
    taken, rejections = admission()
    with taken.hold(3, 8, ANY), taken.hold(4, 8, ANY):
        assert not taken.idle.is_set()
        error = answer_to(taken, 2, 8)
        assert (error.status, error.code, rejections) == (503, "queue_full", {"queue_full": 1})
        with taken.hold(1, 8, ANY):
            assert taken.in_flight == 8
    assert (taken.in_flight, taken.idle.is_set()) == (0, True)


@pytest.mark.parametrize(("capacity", "most"), [(320, 80), (64, 16), (20, 10), (8, 4), (1, 1)])
def test_one_request_cannot_ask_for_more_than_a_part_of_all_places(capacity: int, most: int) -> None:
    taken, _ = admission()
    with taken.hold(most, capacity, ANY):
        pass
    error = answer_to(taken, most + 1, capacity)
    assert (error.status, error.param) == (400, "n")


def test_a_key_finds_its_share_of_places_whatever_another_one_holds() -> None:
    taken, _ = admission()
    with ExitStack() as held:
        for _ in range(16):
            held.enter_context(taken.hold(1, 16, A))
        assert answer_to(taken, 1, 16, A).code == "queue_full"
        for _ in range(8):
            held.enter_context(taken.hold(1, 16, B))
        assert answer_to(taken, 1, 16, B).code == "queue_full"
        heavy = Terms("c", weight=2.0)
        for _ in range(8):
            held.enter_context(taken.hold(1, 16, heavy))
        assert answer_to(taken, 1, 16, heavy).code == "queue_full"


def test_a_key_with_a_part_of_the_places_gets_no_more_of_an_empty_service() -> None:
    taken, rejections = admission()
    half = Terms("a", queue=0.5)
    with taken.hold(4, 8, half):
        error = answer_to(taken, 1, 8, half)
        assert (error.status, error.code, rejections["key_queue_full"]) == (429, "key_queue_full", 1)
        assert error.retry_after_s is not None
        with taken.hold(4, 8, B):
            pass


def test_background_requests_leave_the_places_of_others_alone() -> None:
    taken, _ = admission()
    background = Terms(patient=True, background=True)
    with taken.hold(4, 8, background), taken.hold(4, 8, background):
        answer_to(taken, 1, 8, background)
        with taken.hold(4, 8, ANY):
            pass


def test_who_would_wait_too_long_is_refused_at_once_and_told_how_long() -> None:
    taken, rejections = admission(jitter=0.5)
    taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 6, 96, 16)))
    error = answer_to(taken, 1, 64, A)
    assert (error.status, error.code, rejections) == (503, "overloaded", {"overloaded": 1})
    assert error.retry_after_s == pytest.approx(7.0 * 1.125)
    with taken.hold(1, 64, B):
        pass
    with taken.hold(1, 64, Terms("a", patient=True)):
        pass


def test_nobody_waits_for_requests_that_have_all_left() -> None:
    taken, _ = admission()
    with taken.hold(1, 64, A):
        taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 6, 96, 16)))
        assert answer_to(taken, 1, 64, A).code == "overloaded"
    with taken.hold(1, 64, A):
        assert taken.in_flight == 1


def test_a_key_that_asks_one_thing_after_another_does_not_wait_for_what_it_has() -> None:
    clock = Clock()
    taken, _ = admission(clock)
    with taken.hold(1, 64, B):
        taken.on_load(load(limit_s=0.5, b=Backlog(1.0, 8, 60, 960, 16)))
        for _ in range(20):
            clock.now += 0.01
            with taken.hold(1, 64, A):
                pass


def test_what_will_have_been_done_since_the_engine_told_its_load_is_not_waited_for() -> None:
    clock = Clock()
    taken, _ = admission(clock)
    taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 5, 80, 16)))
    answer_to(taken, 1, 64, A)
    with ExitStack() as held:
        clock.now += 0.5
        answer_to(taken, 1, 64, A)
        clock.now += 0.5
        held.enter_context(taken.hold(1, 64, A))
        answer_to(taken, 1, 64, A)
        clock.now += 100.0
        answer_to(taken, 1, 64, A)
        taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 0, 0, 16)))
        for _ in range(5):
            held.enter_context(taken.hold(1, 64, A))
            clock.now += 0.25
        answer_to(taken, 1, 64, A)


def test_each_of_several_frontends_leaves_room_for_those_that_the_others_send_away() -> None:
    for num_frontends in (1, 3):
        taken = Admission(Counter(), lambda: 0.0, Clock(), num_frontends)
        taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 6, 96, 16)))
        times = [answer_to(taken, 1, 64, A).retry_after_s for _ in range(3)]
        assert times == pytest.approx([7.0, 7.0 + num_frontends, 7.0 + 2 * num_frontends])


def test_choices_that_the_engine_has_not_counted_yet_count_as_well() -> None:
    clock = Clock()
    taken, _ = admission(clock)
    taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 2, 32, 16)))
    clock.now += 0.1
    with taken.hold(3, 64, A):
        assert answer_to(taken, 1, 64, A).code == "overloaded"
        told = load(limit_s=5.0, a=Backlog(1.0, 8, 0, 0, 16))
        taken.on_load(Load(101.0, 5.0, 1.0, 16, 8, 1.0, 16, told.tenants))
        with taken.hold(1, 64, A):
            pass


def test_a_request_with_a_time_of_its_own_is_refused_by_that() -> None:
    taken, _ = admission()
    taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 2, 32, 16)))
    answer_to(taken, 1, 64, Terms("a", ttft_s=1.0))
    with taken.hold(1, 64, Terms("a", ttft_s=4.0)):
        pass


def test_those_who_are_sent_away_are_told_to_come_back_one_after_another() -> None:
    clock = Clock()
    taken, _ = admission(clock)
    taken.on_load(load(limit_s=1.0, a=Backlog(1.0, 8, 4, 64, 16)))
    told = [answer_to(taken, 1, 64, A).retry_after_s for _ in range(80)]
    assert told[:4] == [5.0, 6.0, 7.0, 8.0]
    assert max(seconds or 0.0 for seconds in told) == 60.0
    clock.now += 50.0
    taken.on_load(load(limit_s=1.0, a=Backlog(1.0, 8, 4, 64, 16)))
    assert answer_to(taken, 1, 64, A).retry_after_s == pytest.approx(11.0)


def test_readiness_ends_when_a_newcomer_would_be_refused() -> None:
    taken, _ = admission()
    assert taken.overload() is None
    taken.on_load(load(limit_s=5.0, **{"": Backlog(1.0, 8, 9, 144, 16)}))
    assert "10 s" in (taken.overload() or "")
    taken.on_load(load(limit_s=5.0, a=Backlog(1.0, 8, 9, 144, 16)))
    assert taken.overload() is None, "another key's requests are not refused"


def terms(identity: Identity = ANYONE, header: str | None = None, **fields: Any) -> Terms:
    headers = [] if header is None else [(b"x-moeserve-slo", header.encode())]
    scope = {"state": {"identity": identity}, "headers": headers}
    return read_terms(scope, SECRET, SERVICE, **fields)


PLAIN = Identity(b"\1" * 32, frozenset({USER}))


def test_without_keys_all_are_one_tenant_and_a_key_is_one_of_its_own() -> None:
    assert terms() == Terms()
    other = Identity(
        b"\2" * 32, frozenset({USER}), Rights(retention=0.3, weight=2.0, running=0.5, queue=0.25, cached=0.1)
    )
    assert terms(PLAIN).tenant != terms(other).tenant != ""
    granted = terms(other)
    assert (granted.weight, granted.running, granted.queue) == (2.0, 0.5, 0.25)
    assert (granted.cached, granted.retained) == (0.1, 0.3)


@pytest.mark.parametrize(
    ("identity", "allowed"),
    [
        (ANYONE, True),
        (PLAIN, False),
        (Identity(b"\1" * 32, frozenset({USER}), Rights(priority=True)), True),
        (Identity(b"\1" * 32, frozenset({USER, ADMIN})), True),
    ],
)
def test_only_some_keys_may_be_more_urgent_than_others(identity: Identity, allowed: bool) -> None:
    assert terms(identity, priority=3).tenant == terms(identity).tenant
    if allowed:
        terms(identity, priority=-1)
        assert terms(identity, "tpot:20ms").tpot_s == pytest.approx(0.02)
        return
    with refused("insufficient_role", "priority"):
        terms(identity, priority=-1)
    with refused("invalid_value", "x-moeserve-slo", "0.1s"):
        terms(identity, "tpot:20ms")


def test_a_request_may_bring_times_of_its_own_within_those_of_the_service() -> None:
    asked = terms(PLAIN, "ttft:500ms, tpot:2s")
    assert (asked.ttft_s, asked.tpot_s) == (0.5, 2.0)
    for header in ("ttft:31s", "ttft:0s", "ttft", "e2e:1s", "ttft:1s,ttft:2s", "ttft:-1s", "ttft:nan"):
        with refused("invalid_value", "x-moeserve-slo") as caught:
            terms(PLAIN, header)
        assert caught.value.status == 400


def test_background_requests_are_patient_and_have_no_priority() -> None:
    asked = terms(PLAIN, background=True)
    assert asked.background
    assert asked.patient
    with refused("invalid_value", "background"):
        terms(PLAIN, background=True, priority=1)


def test_a_key_file_grants_weights_and_shares(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "user:alice weight=2 queue=0.5  retention=0.1\nbob running=0.25 cached=0 priority=yes\nadmin:two words\n"
    )
    keys = load_keys((), str(file))
    found = [keys.find(key) for key in (b"alice", b"bob", b"two words")]
    assert [identity and identity.rights for identity in found] == [
        Rights(retention=0.1, weight=2.0, queue=0.5),
        Rights(running=0.25, cached=0.0, priority=True),
        Rights(),
    ]


@pytest.mark.parametrize(
    "right",
    ["weight=0", "weight=nan", "weight=x", "queue=2", "running=-1", "stored=2", "priority=1", "queue="],
)
def test_a_right_that_is_none_is_named(tmp_path: Path, right: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"user:alice {right}\n")
    with pytest.raises(ConfigError, match=f"line 1 of the key file: `{right.partition('=')[0]}=`"):
        load_keys((), str(file))


def test_keys_share_the_response_store_by_weight_unless_the_file_names_a_share(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("user:alice stored=0.4\nuser:bob weight=2\nadmin:carol\nmetrics:m\n")
    keys = load_keys((), str(file))
    shares = [keys.stored_share(hashlib.sha256(key).digest()) for key in (b"alice", b"bob", b"carol", b"gone", b"m")]
    assert shares == pytest.approx([0.4, 0.4, 0.2, 0.0, 0.0])
    assert load_keys((), None).stored_share(b"") == 1.0
    file.write_text("user:alice stored=0.6\nuser:bob stored=0.5\n")
    with pytest.raises(ConfigError, match="`stored=`"):
        load_keys((), str(file))
