"""`moeserve pull` against a local server that has the hub's routes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.forking import popen
from tests.support.local_http import Handler, local_server

COMMIT = "c0ffee" + 34 * "0"
# The hub library writes pieces of 10 MiB: half of this is more than one.
WEIGHTS = bytes(range(256)) * (24 * 2**12)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tiny-Q4_K_M.gguf": WEIGHTS[: 2**19],
    "tiny-Q8_0.gguf": WEIGHTS[: 2**18],
}


class Hub:
    """Knows what the server was asked for. breaks: a file whose first answer ends in the middle. lies: a file that is
    listed with a wrong checksum."""

    def __init__(self, breaks: str = "", lies: str = "") -> None:
        self.breaks, self.lies = breaks, lies
        self.fetched: list[tuple[str, str | None]] = []

    def listing(self) -> bytes:
        siblings = []
        for name, content in FILES.items():
            said = content + b"x" if name == self.lies else content
            sibling = {"rfilename": name, "size": len(content), "blobId": git_sum(said)}
            if name.endswith((".safetensors", ".gguf")):
                of_file = hashlib.sha256(said).hexdigest()
                sibling["lfs"] = {"size": len(content), "sha256": of_file, "pointerSize": 134}
            siblings.append(sibling)
        return json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()

    def tree(self) -> bytes:
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": git_sum(content)}
            for name, content in FILES.items()
        ]
        return json.dumps(files).encode()


def git_sum(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub(state: Hub) -> Iterator[str]:
    class Routes(Handler):
        def do_HEAD(self) -> None:
            self.serve(with_body=False)

        def do_GET(self) -> None:
            self.serve(with_body=True)

        def serve(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/name/tree/"):
                self.reply(200, state.tree(), {"Content-Type": "application/json"}, with_body)
                return
            if path.startswith("/api/models/owner/name"):
                self.reply(200, state.listing(), {"Content-Type": "application/json"}, with_body)
                return
            name = path.rpartition("/")[2]
            content = FILES.get(name) if path.startswith("/owner/name/resolve/") else None
            if content is None:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
                return
            asked, start = self.headers.get("Range"), 0
            headers = {"ETag": f'"{git_sum(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if asked:
                start = int(asked.removeprefix("bytes=").partition("-")[0])
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            if with_body:
                state.fetched.append((name, asked))
            breaks = with_body and name == state.breaks
            if breaks:
                state.breaks = ""
            self.reply(206 if asked else 200, content[start:], headers, with_body, half=breaks)

        def reply(
            self, status: int, content: bytes, headers: dict[str, str], with_body: bool, *, half: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(content[: len(content) // 2] if half else content)

    with local_server(Routes) as address:
        yield f"http://{address}"


def pull(endpoint: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    command, pipe = [sys.executable, "-m", "launcher.cli", "pull", *arguments], subprocess.PIPE
    with popen(command, torch=False, env=environment, stdout=pipe, stderr=pipe, text=True) as program:
        said, errors = program.communicate()
    return subprocess.CompletedProcess(command, program.returncode, said, errors)


def test_a_model_is_fetched_resumed_and_verified(tmp_path: Path) -> None:
    state = Hub(breaks="model.safetensors")
    with hub(state) as endpoint:
        done = pull(endpoint, tmp_path, "owner/name")
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        asked = [of for name, of in state.fetched if name == "model.safetensors"]
        count = len(state.fetched)
        assert pull(endpoint, tmp_path, "owner/name").stdout == done.stdout
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(asked) == 2
    assert asked[1] is not None
    assert len(state.fetched) == count, "present files are not fetched again"
    assert "download" in done.stderr
    assert "verify" in done.stderr


@pytest.mark.slow
def test_a_file_that_differs_from_its_checksum_is_removed_and_named(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        with hub(Hub(lies=name)) as endpoint:
            done = pull(endpoint, tmp_path, "owner/name")
        assert done.returncode == 1
        assert done.stderr.endswith(
            f"Error: 1 of 3 files differ from the hub's checksums, the first is {name}: they are removed, pull again "
            "to fetch them anew.\n"
        )
        assert not list(tmp_path.rglob(f"snapshots/*/{name}"))
    with hub(Hub()) as endpoint:
        assert pull(endpoint, tmp_path, "owner/name").returncode == 0


@pytest.mark.slow
def test_of_gguf_files_a_kind_or_a_file_is_fetched(tmp_path: Path) -> None:
    state = Hub()
    with hub(state) as endpoint:
        for asked, name in (("q4_k_m", "tiny-Q4_K_M.gguf"), ("tiny-Q8_0.gguf", "tiny-Q8_0.gguf")):
            done = pull(endpoint, tmp_path, f"owner/name:{asked}")
            assert done.returncode == 0, done.stderr
            assert Path(done.stdout.strip()).read_bytes() == FILES[name]
            assert [fetched for fetched, _ in state.fetched] == [name]
            state.fetched.clear()
        missing = pull(endpoint, tmp_path, "owner/name:tiny-Q2_K.gguf").stderr
    assert missing.endswith("Error: Model owner/name has no file tiny-Q2_K.gguf; these are there: Q4_K_M, Q8_0.\n")


def test_without_a_hub_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    with hub(Hub()) as endpoint:
        pass
    done = pull(endpoint, tmp_path, "owner/name")
    assert done.returncode == 1
    assert "Error: The hub cannot be reached (" in done.stderr
    assert "Traceback" not in done.stderr
    assert "is a path on this machine" in pull(endpoint, tmp_path, "./model").stderr
