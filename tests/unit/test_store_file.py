"""Locks beside a response store: who has ended, which services may share it, and where it may lie."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moeserve.frontend.store.file import Locks, Owner, network_of

HOLDER = """
import sys
from pathlib import Path
from moeserve.frontend.store.file import Owner
owner = Owner(Path(sys.argv[1]))
owner.hold()
print(owner.name, flush=True)
sys.stdin.read()
"""


def test_an_owner_is_dead_once_its_process_has_ended_and_not_while_it_stands_still(tmp_path: Path) -> None:
    store = tmp_path / "store"
    me = Owner(store)
    me.hold()
    command = [sys.executable, "-c", HOLDER, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        assert not me.is_dead(name)
        assert not me.is_dead(me.name)
        assert me.is_dead("0123456789abcdef")
        other.send_signal(signal.SIGSTOP)
        assert not me.is_dead(name)
        other.kill()
        other.wait()
    assert me.is_dead(name)
    me.release()


def test_an_owner_that_lets_go_is_dead_for_others(tmp_path: Path) -> None:
    first, second = Owner(tmp_path / "store"), Owner(tmp_path / "store")
    first.hold()
    second.hold()
    assert not second.is_dead(first.name)
    first.release()
    assert second.is_dead(first.name)
    second.release()


@pytest.mark.parametrize("other", [0, 6, 8, 2**61 - 1, 2**64 - 1])
def test_services_of_one_kind_share_a_store_and_others_are_kept_out(tmp_path: Path, other: int) -> None:
    first, second, third = (Locks(tmp_path / "store") for _ in range(3))
    assert first.join(7)
    assert second.join(7)
    assert not third.join(other)
    third.close()
    first.close()
    fourth = Locks(tmp_path / "store")
    assert not fourth.join(other)
    fourth.close()
    second.close()
    fifth = Locks(tmp_path / "store")
    assert fifth.join(other)
    fifth.close()


def test_owners_keep_no_service_out(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "store")
    owner.hold()
    locks = Locks(tmp_path / "store")
    assert locks.join(1)
    locks.close()
    owner.release()


MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:40 / /mnt/a\\040b rw shared:2 - nfs4 server:/x rw,vers=4.2
23 22 8:2 / /mnt/a\\040b/local rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/var/store", None), ("/mnt/a b/store", "nfs4"), ("/mnt/a b/local/store", None), ("/mnt/a bc/store", None)],
)
def test_a_network_file_system_is_found_by_the_mount_nearest_to_the_path(path: str, expected: str | None) -> None:
    assert network_of(Path(path), MOUNTS) == expected
