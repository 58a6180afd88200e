"""`moeserve cache` over a folder of expert files."""

from __future__ import annotations

import os
from pathlib import Path

from click.testing import CliRunner, Result

from launcher.cli import main
from moeserve.model.cache import ensure_built
from moeserve.model.expert_folders import BUILDER, EXPERT_FILE, expert_folders, find_folder


def run(command: str, folder: Path) -> Result:
    return CliRunner().invoke(main, ["cache", command, str(folder)])


def store_with(tmp_path: Path, *models: str) -> Path:
    store = tmp_path / "store"
    for number, model in enumerate(models):

        def build(folder: Path, _: object) -> None:
            folder.mkdir()
            (folder / EXPERT_FILE).write_bytes(bytes(2**20))

        source = bytes([number]) * 32
        ensure_built(
            find_folder(store, model, source), builder=f"{BUILDER} 1 {source.hex()}", build=build, bytes_needed=0
        )
    return store


def test_expert_files_are_listed_verified_and_cleared(tmp_path: Path) -> None:
    store = store_with(tmp_path, "some", "other")
    listed = run("list", store).output
    assert listed.splitlines()[0] == f"other-{'01' * 8}  1 MiB, written 0.0 hours ago", listed
    assert len(listed.splitlines()) == 2
    assert run("verify", store).output == "2 files, 0 damaged.\n"
    (store / f"some-{'00' * 8}" / EXPERT_FILE).write_bytes(b"x" * 2**20)
    damaged = run("verify", store)
    assert damaged.exit_code == 1
    assert damaged.output.endswith("does not have the content (sha256) that its manifest says.\n2 files, 1 damaged.\n")
    assert run("clear", store).output == "2 expert files removed, 2 MiB.\n"
    assert not expert_folders(store)
    assert not list(store.glob("*/*"))
    assert run("list", store).output == f"{store} holds no expert files.\n"


def test_what_others_wrote_stays(tmp_path: Path) -> None:
    store = store_with(tmp_path, "some")
    strange = store / f"some-{'00' * 8}" / "notes"
    strange.write_text("mine")
    (store / "mine").mkdir()
    (store / "mine/file").write_text("mine")
    for command in ("list", "verify", "clear"):
        refused = run(command, store)
        assert refused.exit_code == 1
        assert refused.output == f"Error: {store} is no folder of --kv-disk-path or --expert-store-dir.\n"
    assert strange.exists()


def test_builds_that_were_killed_are_listed_and_cleared(tmp_path: Path) -> None:
    store = tmp_path / "store"
    unfinished = store / f".some-{'ab' * 8}.tmp-x1y2" / "new"
    unfinished.mkdir(parents=True)
    (unfinished / EXPERT_FILE).write_bytes(bytes(2**20))
    assert run("list", store).output == f"some-{'ab' * 8}  unfinished\n"
    assert run("verify", store).output == "0 files, 0 damaged.\n"
    assert run("clear", store).output == "1 expert files removed, 1 MiB.\n"
    assert not list(store.glob(".*tmp*"))


def test_a_service_that_has_mapped_a_file_keeps_it(tmp_path: Path) -> None:
    store = store_with(tmp_path, "some")
    file = os.open(store / f"some-{'00' * 8}" / EXPERT_FILE, os.O_RDONLY)
    run("clear", store)
    assert len(os.read(file, 2**21)) == 2**20
    os.close(file)
