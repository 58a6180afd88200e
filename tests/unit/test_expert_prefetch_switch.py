"""Prefetching goes on where it pays, stops where it does not, and is tried again."""

from experts.prediction.planning import PrefetchSwitch, SwitchRules

RULES = SwitchRules(memory=8, trial=4, first_pause=3, longest_pause=6)


def run(switch, num_steps, gain, cost):
    """Whether it was on, before each step."""
    found = []
    for _ in range(num_steps):
        found.append(switch.on)
        switch.step_done(gain, cost)
    return found


def test_it_stays_on_where_it_pays():
    assert all(run(PrefetchSwitch(RULES), 100, 1.0, 0.9))


def test_it_rests_where_it_costs_as_much_as_it_saves_and_each_time_longer():
    states = run(PrefetchSwitch(RULES), 24, 1.0, 1.0)
    assert states == [True] * 4 + [False] * 3 + [True] * 4 + [False] * 6 + [True] * 4 + [False] * 3


def test_a_single_bad_step_does_not_switch_it_off():
    switch = PrefetchSwitch(RULES)
    run(switch, 20, 1.0, 0.5)
    assert run(switch, 1, 0.0, 2.0) == [True]
    assert all(run(switch, 20, 1.0, 0.5))


def test_it_switches_off_when_it_stops_paying():
    switch = PrefetchSwitch(RULES)
    run(switch, 50, 1.0, 0.5)
    assert run(switch, 8, 0.0, 0.5)[-1] is False


def test_a_good_trial_makes_the_next_rest_short_again():
    switch = PrefetchSwitch(RULES)
    run(switch, 14, 0.0, 1.0)
    assert switch.on is False
    run(switch, 40, 1.0, 0.0)
    assert switch.on
    off = run(switch, 40, -10.0, 0.0)
    first = off.index(False)
    assert off[first : first + 4] == [False] * 3 + [True]
