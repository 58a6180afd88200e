"""Which grammar is compiled next, and which compiled ones are kept."""

from __future__ import annotations

from moeserve.grammars.queue import FairJobs, Kept, KeptGrammars


def drain(jobs: FairJobs[str], cost: float = 1.0) -> list[str]:
    """Every job in the order of service; each costs its tenant (its first letter) the same."""
    order = []
    while (job := jobs.pop()) is not None:
        order.append(job)
        jobs.charge(job[0], cost)
    return order


def test_tenants_take_turns_and_their_jobs_go_by_age() -> None:
    jobs = FairJobs[str](0)
    for number in range(4):
        jobs.put("a", f"a{number}")
    jobs.put("b", "b0")
    jobs.put("b", "b1")
    assert drain(jobs) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert (len(jobs), jobs.pop()) == (0, None)


def test_a_tenant_with_dear_jobs_waits_until_others_have_had_as_much() -> None:
    jobs = FairJobs[str](0)
    jobs.put("a", "a0")
    assert jobs.pop() == "a0"
    jobs.charge("a", 2.5)
    for number in range(4):
        jobs.put("b", f"b{number}")
    jobs.put("a", "a1")
    assert drain(jobs) == ["b0", "b1", "b2", "a1", "b3"]


def test_idleness_earns_no_grammars() -> None:
    jobs = FairJobs[str](0)
    jobs.put("b", "b0")
    assert jobs.pop() == "b0"
    for number in range(50):
        jobs.put("a", f"a{number}")
        assert jobs.pop() == f"a{number}"
        jobs.charge("a", 1.0)
    for number in range(3):
        jobs.put("a", f"a{number}")
        jobs.put("b", f"b{number}")
    order = drain(jobs)
    assert order.index("a1") < 5


def test_results_beyond_the_bound_wait_for_a_release_but_no_tenant_waits_for_another_one() -> None:
    jobs = FairJobs[str](10)
    for name in ("a0", "a1", "a2"):
        jobs.put("a", name, 5)
    jobs.put("b", "b0", 5)
    assert drain(jobs) == ["a0", "b0"], "the results take 10 bytes now"
    jobs.put("a", "mask")
    jobs.put("c", "c0", 8)
    assert jobs.pop() == "c0", "a tenant that holds nothing gets one beyond the bound"
    jobs.release("a", 5)
    assert jobs.pop() == "a1", "and one that holds nothing any more"
    assert jobs.pop() is None
    for tenant, num_bytes in (("a", 5), ("b", 5), ("c", 8)):
        jobs.release(tenant, num_bytes)
    assert [jobs.pop() for _ in range(3)] == ["a2", "mask", None]
    jobs.release("a", 5)
    assert jobs.num_held_bytes == 0


def test_a_removed_job_never_runs() -> None:
    jobs = FairJobs[str](0)
    jobs.put("a", "a0")
    jobs.put("a", "a1")
    assert jobs.remove("a", "a1")
    assert not jobs.remove("a", "a1")
    assert drain(jobs) == ["a0"]
    assert not jobs.remove("a", "a0")


def kept(text: str, num_bytes: int = 10) -> Kept[str]:
    return Kept(text, text.upper(), "", num_bytes)


def test_the_least_recently_used_grammar_goes_first() -> None:
    grammars = KeptGrammars[str](30)
    for text in "abc":
        grammars.put(kept(text))
    used = grammars.use("a")
    assert used is not None
    grammars.release(used)
    grammars.put(kept("d"))
    assert [text for text in "abcd" if grammars.use(text)] == ["a", "c", "d"]


def test_a_grammar_in_use_is_never_dropped_and_goes_when_its_last_user_has_gone() -> None:
    grammars = KeptGrammars[str](25)
    users = [kept(text) for text in "abcd"]
    for user in users:
        user.num_users = 1
        grammars.put(user)
    assert (len(grammars), grammars.num_bytes) == (4, 40)
    again = grammars.use("a")
    for user in users:
        grammars.release(user)
    assert [text for text in "abcd" if text in grammars] == ["a", "d"]
    assert again is not None
    assert grammars.num_bytes == 20


def test_a_grammar_above_the_bound_is_kept_only_while_it_is_used() -> None:
    grammars = KeptGrammars[str](25)
    large = kept("large", 100)
    large.num_users = 1
    grammars.put(large)
    assert grammars.use("large") is large
    grammars.release(large)
    assert len(grammars) == 1
    grammars.release(large)
    assert (len(grammars), grammars.num_bytes) == (0, 0)


def test_growth_counts_up_to_its_limit_and_makes_others_go() -> None:
    grammars = KeptGrammars[str](30)
    grammars.put(kept("a"))
    grammars.put(kept("b"))
    used = grammars.use("b")
    assert used is not None
    grammars.grow(used, 5, limit=12)
    assert grammars.num_bytes == 25
    grammars.grow(used, 50, limit=12)
    assert (used.num_bytes, grammars.num_bytes, "a" in grammars) == (22, 22, False)


def test_a_forgotten_text_leaves_its_users_their_grammar() -> None:
    grammars = KeptGrammars[str](30)
    grammars.put(kept("a"))
    used = grammars.use("a")
    assert used is not None
    grammars.discard("a")
    grammars.grow(used, 5, limit=12)
    grammars.release(used)
    assert (len(grammars), grammars.num_bytes, used.value) == (0, 0, "A")
