"""Whether and when a process is started again."""

from launcher.life import SOUND_SECONDS, RestartPolicy


def test_a_process_that_served_is_started_again_at_once_up_to_the_limit() -> None:
    policy = RestartPolicy(3)
    assert [policy.next_delay(1.0) for _ in range(5)] == [0.0, 0.0, 0.0, None, None]


def test_a_start_that_fails_is_tried_again_later_and_later() -> None:
    policy = RestartPolicy(20)
    delays = [policy.next_delay(None) for _ in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert policy.next_delay(1.0) == 0.0
    assert policy.next_delay(None) == 0.5


def test_a_process_that_served_for_long_begins_a_new_count() -> None:
    policy = RestartPolicy(2)
    assert [policy.next_delay(1.0), policy.next_delay(1.0)] == [0.0, 0.0]
    assert policy.next_delay(SOUND_SECONDS) == 0.0
    assert policy.next_delay(None) == 0.5
    assert policy.next_delay(1.0) is None


def test_without_restarts_the_first_end_is_the_last() -> None:
    assert RestartPolicy(0).next_delay(10.0 * SOUND_SECONDS) is None
