"""The key file: names, limits, and lines that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import main
from moeserve.config import ConfigError
from moeserve.frontend.key_file import ADMIN, USER, KeyLine, Rights, digest_of, new_line, read_line, read_lines
from moeserve.frontend.keys import KeyRing, load_keys


def test_a_line_names_a_key_and_states_its_limits() -> None:
    line = read_line("user:sk-1 name=alice@work weight=2 tokens=5M/day requests=60/min")
    assert line == KeyLine(USER, "sk-1", "alice@work", Rights(weight=2.0, tokens=5_000_000, requests=60))
    assert read_line("sk-1= tokens=1.5k/day").rights.tokens == 1500


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tokens=5M", "takes a number per day, like tokens=5M/day"),
        ("tokens=5M/week", "takes a number per day"),
        ("tokens=0/day", "takes a number per day"),
        ("tokens=-1/day", "takes a number per day"),
        ("requests=60/day", "takes a number per min, like requests=60/min"),
        ("name=", "takes up to 64 letters"),
        ("name=../x", "takes up to 64 letters"),
        ("token=5M/day", "`token=` is unknown: did you mean `tokens=`?"),
        ("colour=red", "`colour=` is unknown: there are"),
    ],
)
def test_a_wrong_word_is_told_with_its_line_and_without_the_key(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match="line 3 of the key file: ") as caught:
        read_lines(["# people", "", f"user:sk-secret {words}"])
    assert said in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_a_key_without_a_name_is_called_by_its_digest_and_never_by_itself() -> None:
    [identity] = KeyRing([read_line("user:sk-secret-key")])
    assert identity.name == f"key-{digest_of('sk-secret-key').hex()[:8]}"


def test_keys_with_one_name_share_its_limits_and_must_agree_on_them() -> None:
    agreed = [read_line(f"user:{key} name=alice tokens=5M/day") for key in ("old", "new")]
    assert {one.name for one in KeyRing(agreed)} == {"alice"}
    with pytest.raises(ConfigError, match="the keys with the name alice"):
        KeyRing([*agreed, read_line("user:third name=alice")])


def test_a_key_with_two_lines_has_both_roles_and_one_name() -> None:
    [identity] = KeyRing([read_line("user:a name=alice weight=2"), read_line("metrics:a")])
    assert (identity.name, identity.grants, identity.rights.weight) == ("alice", {"user", "metrics"}, 2.0)


def test_a_ring_that_adopts_another_tells_the_keys_that_are_gone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("user:a name=alice\nuser:b name=bob\nadmin:c name=carol\n")
    ring = load_keys(("d",), str(file))
    file.write_text("user:a name=alice weight=3\nuser:c name=carol\nuser:e\n")
    gone = ring.adopt(load_keys(("d",), str(file)))
    assert [one.name for one in gone] == ["bob"]
    found = {key: ring.find(key.encode()) for key in "abcde"}
    assert found["b"] is None
    assert found["a"] is not None
    assert found["a"].rights.weight == 3.0
    assert found["c"] is not None
    assert found["c"].grants == {"user"}
    assert found["d"] is not None
    assert found["e"] is not None


def test_a_new_line_is_read_as_it_was_asked_for_and_its_key_is_new() -> None:
    first, second = (new_line("alice", ADMIN, [("tokens", "5M/day")]) for _ in range(2))
    one, two = read_line(first), read_line(second)
    assert (one.role, one.name, one.rights.tokens) == (ADMIN, "alice", 5_000_000)
    assert one.key != two.key
    assert len(one.key) >= 40
    with pytest.raises(ConfigError):
        new_line("alice", USER, [("tokens", "many")])


def test_a_line_is_printed_for_each_name() -> None:
    done = CliRunner().invoke(main, ["key", "new", "alice", "bob", "--tokens", "5M/day"])
    lines = [read_line(line) for line in done.stdout.splitlines()]
    assert [(line.name, line.rights.tokens) for line in lines] == [("alice", 5_000_000), ("bob", 5_000_000)]
    assert len({line.key for line in lines}) == 2
