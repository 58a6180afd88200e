"""Resolving MODEL to a folder: what a local folder must hold, and how hub errors read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from moeserve.model import files, source
from moeserve.model.packed.config import quantization_in
from moeserve.model.source import resolve_config, resolve_model
from moeserve.model.spec import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def refusal(model: str | None, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(model, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_a_complete_local_folder_is_returned(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("spelling", ["~/model", "./model", "model", "model/"])
def test_a_folder_may_be_spelled_relative_or_from_home(
    folder: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model(spelling).samefile(folder)


def test_a_missing_folder_is_named() -> None:
    assert "There is no folder /no/such/folder" in refusal("/no/such/folder")


def test_a_file_is_refused(folder: Path) -> None:
    assert "is not a folder" in refusal(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_missing_file_of_a_model_is_named(folder: Path, name: str, words: str) -> None:
    (folder / name).unlink()
    assert words in refusal(str(folder))


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(str(folder))
    assert name in message
    assert "convert them to safetensors" in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert "lacks 1 of 2 weight files, the first is model-2.safetensors" in refusal(str(folder))


def test_a_broken_index_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "is not an index" in refusal(str(folder))


@pytest.mark.parametrize("model", [None, "demo", "demo-split"])
def test_a_revision_of_a_demo_is_refused(model: str | None) -> None:
    assert "but not of the demo model" in refusal(model, revision="v1")


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    assert "revision" in refusal(str(folder), revision="v1")


def test_a_folder_that_has_the_name_of_a_demo_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "demo has no config.json" in refusal("demo")


def test_importing_the_resolver_imports_neither_torch_nor_hub() -> None:
    code = (
        "import sys; import moeserve.model.source, moeserve.model.demo; "
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- the hub ---------------------------------------------------------------------------------------------------------

FILES = {"config.json": 2, "tokenizer.json": 2, "model.safetensors": 1000, "pytorch_model.bin": 9000, "run.py": 10}


class FakeHub:
    """Stands in for the hub library's three calls; raises what a test puts into `look_up` or `fetch`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = dict(FILES)
        self.look_up: Exception | None = None
        self.fetch: Exception | None = None
        self.local: Exception | None = None
        self.cached: set[str] = set()
        self.calls: list[dict[str, Any]] = []

    def model_info(self, api: object, repo: str, **options: Any) -> SimpleNamespace:
        if self.look_up is not None:
            raise self.look_up
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.calls.append(options)
        error = self.local if options["local_files_only"] else self.fetch
        if error is not None:
            raise error
        return str(self.folder)

    def try_to_load_from_cache(self, repo: str, name: str, **options: Any) -> str | None:
        return f"/cache/{name}" if name in self.cached else None


@pytest.fixture
def fake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: fake.model_info(*a, **k))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", fake.try_to_load_from_cache)
    return fake


def http_error(kind: Callable[..., Exception], status: int) -> Exception:
    return kind("refused", response=httpx2.Response(status, request=httpx2.Request("GET", "https://hub.test/model")))


def test_a_hub_model_is_fetched_at_its_revision_without_code_or_pickles(fake: FakeHub, tmp_path: Path) -> None:
    assert resolve_model("owner/name", revision="v2", cache_dir=tmp_path) == fake.folder
    (call,) = fake.calls
    assert (call["revision"], call["cache_dir"]) == ("v2", tmp_path)
    chosen = huggingface_hub.utils.filter_repo_objects(
        [*FILES, "original/params.json", "consolidated.00.safetensors", "chat_template.jinja"],
        allow_patterns=call["allow_patterns"],
        ignore_patterns=call["ignore_patterns"],
    )
    assert set(chosen) == {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}


def test_progress_counts_the_bytes_of_the_bar_that_is_further_on(fake: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    resolve_model("owner/name", progress=lambda *event: seen.append(event))
    bar_class = fake.calls[0]["tqdm_class"]
    files, received, written = bar_class(total=3), bar_class(total=0, unit="B"), bar_class(total=0, unit="B")
    files.update(1)
    received.update(600)
    written.update(500)
    written.update(9999)
    assert seen == [
        ("look up model", 0, 0),
        ("download", 600, 1004),
        ("download", 600, 1004),
        ("download", 1004, 1004),
    ]


QUANTISED = {
    "README.md": 5,
    "tiny-Q4_K_M.gguf": 700,
    "tiny-Q8_0.gguf": 1000,
    "mmproj-F16.gguf": 90,
    "BF16/tiny-BF16-00001-of-00002.gguf": 1500,
    "BF16/tiny-BF16-00002-of-00002.gguf": 1400,
}


def test_one_kind_of_a_gguf_repository_is_fetched(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.files = QUANTISED
    made: list[Path] = []
    monkeypatch.setattr("moeserve.model.gguf.folder.gguf_folder", lambda path, **_: made.append(path) or fake.folder)
    for kind, names in (
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
    ):
        resolve_model(f"owner/name:{kind}")
        assert fake.calls[-1]["allow_patterns"] == names
        assert made[-1] == fake.folder / names[0]


def test_of_a_gguf_repository_a_kind_must_be_named(fake: FakeHub) -> None:
    fake.files = QUANTISED
    assert refusal("owner/name:Q5_K_M").endswith(
        "has no GGUF file of kind Q5_K_M; these are there: BF16, Q4_K_M, Q8_0."
    )
    assert "as owner/name:Q4_K_M" in refusal("owner/name")
    fake.files = {"a-Q8_0.gguf": 1, "b-Q8_0.gguf": 1}
    assert "has 2 GGUF models of kind Q8_0: name a file of one, as owner/name:" in refusal("owner/name:Q8_0")
    fake.files = dict(FILES)
    assert refusal("owner/name:Q8_0") == "Model owner/name has no GGUF file of kind Q8_0."


def test_of_gguf_files_in_the_cache_a_kind_must_be_named_too(fake: FakeHub) -> None:
    fake.folder = fake.folder.with_name("snapshot")
    (fake.folder / "sub").mkdir(parents=True)
    for name in ("tiny-Q4_K_M.gguf", "sub/tiny-Q8_0.gguf"):
        (fake.folder / name).touch()
    assert refusal("owner/name", offline=True).endswith(
        "name one by its kind, as owner/name:Q4_K_M; these are there: Q8_0, Q4_K_M."
    )
    assert refusal("owner/name:", offline=True) == (
        "owner/name: names no kind of file behind the colon; these are there: Q8_0, Q4_K_M."
    )


def test_a_folder_of_gguf_files_says_how_to_name_one(tmp_path: Path) -> None:
    for name in ("tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    first = tmp_path / "tiny-Q8_0-00001-of-00002.gguf"
    assert refusal(str(tmp_path)) == f"{tmp_path} holds GGUF files alone: name one, as {first}."
    (tmp_path / "tiny-Q4_0.gguf").touch()
    assert refusal(str(tmp_path)).endswith(f"; moeserve doctor {tmp_path} says which to take.")


def test_an_unknown_model_reads_as_such(fake: FakeHub) -> None:
    fake.look_up = http_error(errors.RepositoryNotFoundError, 401)
    message = refusal("owner/name")
    assert "neither a folder 'owner/name' here nor a public model" in message
    assert "HF_TOKEN" in message


@pytest.mark.parametrize("at", ["look_up", "fetch"])
def test_a_gated_model_says_how_to_get_in(fake: FakeHub, at: str) -> None:
    setattr(fake, at, http_error(errors.GatedRepoError, 403))
    message = refusal("owner/name")
    assert "gated" in message
    assert "HF_TOKEN" in message


def test_an_unknown_revision_is_named(fake: FakeHub) -> None:
    fake.look_up = http_error(errors.RevisionNotFoundError, 404)
    assert "has no revision 'v9'" in refusal("owner/name", revision="v9")


def test_a_disabled_repository_is_a_refusal_of_the_hub(fake: FakeHub) -> None:
    fake.look_up = http_error(errors.DisabledRepoError, 403)
    assert "The hub refused model owner/name: HTTP status 403" in refusal("owner/name")


@pytest.mark.parametrize(
    "trouble",
    [
        httpx2.ConnectError("no route"),
        httpx2.ConnectTimeout("timed out"),
        httpx2.ProxyError("proxy"),
        http_error(errors.HfHubHTTPError, 503),
        http_error(errors.HfHubHTTPError, 429),
    ],
)
def test_an_unreachable_hub_falls_back_to_the_cache(fake: FakeHub, trouble: Exception) -> None:
    fake.look_up = trouble
    assert resolve_model("owner/name") == fake.folder
    assert fake.calls[0]["local_files_only"] is True
    fake.local = errors.LocalEntryNotFoundError("not there")
    message = refusal("owner/name")
    assert "not completely in the cache" in message
    assert "cannot be reached" in message


def test_offline_asks_the_cache_alone(fake: FakeHub) -> None:
    fake.look_up = AssertionError("the network was asked")
    assert resolve_model("owner/name", offline=True) == fake.folder
    fake.local = errors.IncompleteSnapshotError("half", snapshot_path="/cache")
    message = refusal("owner/name", offline=True, revision="v1")
    assert "at revision v1" in message
    assert "offline mode is on" in message


def test_the_offline_variable_counts_as_the_flag(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fake.look_up = AssertionError("the network was asked")
    assert resolve_model("owner/name") == fake.folder


@pytest.mark.parametrize("trouble", [httpx2.ReadError("reset"), errors.LocalEntryNotFoundError("gone")])
def test_a_download_that_breaks_off_says_that_it_resumes(fake: FakeHub, trouble: Exception) -> None:
    fake.fetch = trouble
    assert "broke off" in refusal("owner/name")


def test_a_disk_too_small_is_said_with_numbers_before_the_download(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.files["model.safetensors"] = 90 * 10**9
    monkeypatch.setattr(source.shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 10**9))
    message = refusal("owner/name", cache_dir=tmp_path / "not" / "yet")
    assert "83.9 GiB" in message
    assert "1.8 GiB" in message
    assert not fake.calls
    fake.cached = {"model.safetensors"}
    assert resolve_model("owner/name", cache_dir=tmp_path) == fake.folder


@pytest.mark.parametrize(
    ("trouble", "words"),
    [(OSError(28, "No space left on device"), "ran full"), (PermissionError(13, "Permission denied"), "denied")],
)
def test_trouble_with_the_cache_folder_is_one_sentence(fake: FakeHub, trouble: OSError, words: str) -> None:
    fake.fetch = trouble
    assert words in refusal("owner/name")


def test_a_hub_model_with_pickles_only_is_refused_before_the_download(fake: FakeHub) -> None:
    del fake.files["model.safetensors"]
    assert "pytorch_model.bin" in refusal("owner/name")
    assert not fake.calls


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_hub_model_that_lacks_a_file_is_refused_before_the_download(fake: FakeHub, name: str) -> None:
    del fake.files[name]
    assert name in refusal("owner/name")
    assert not fake.calls


@pytest.mark.parametrize("offline", [True, False])
def test_a_name_the_hub_would_not_take_is_refused(folder: Path, offline: bool) -> None:
    assert "neither a folder here nor a name" in refusal("what is this?", offline=offline)


READ_WHOLE = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", [*READ_WHOLE, "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_a_model_folder_is_refused_without_being_opened(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is not a regular file" in refusal(str(folder))


def test_a_device_in_a_model_folder_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    assert "config.json is not a regular file" in refusal(str(folder))


@pytest.mark.parametrize("name", [*READ_WHOLE, "manifest.json", "additional_chat_templates/tool_use.jinja"])
def test_a_file_of_endless_size_is_refused_before_it_is_read(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("ab") as file:
        file.truncate(20 * 2**30)
    assert f"{name} has {20 * 2**30} bytes; at most " in refusal(str(folder))


def test_files_that_are_never_read_may_be_anything(folder: Path) -> None:
    os.mkfifo(folder / "trainer_state.json")
    (folder / "README.md").symlink_to("/dev/zero")
    assert resolve_model(str(folder)) == folder


def test_a_config_nested_without_end_is_one_sentence(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)
    assert "config.json is not valid JSON" in refusal(str(folder))


def test_a_generation_config_that_is_none_is_refused_before_weights_are_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")
    assert "generation configuration" in refusal(str(folder))


def test_weights_that_may_not_be_read_are_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: "safetensors" not in str(path))  # root may read everything
    assert "model.safetensors cannot be read (Permission denied)" in refusal(str(folder))


def test_a_path_that_is_not_utf8_is_one_sentence(folder: Path) -> None:
    odd = folder.rename(folder.parent / os.fsdecode(b"m\xff"))
    assert "is not UTF-8: rename the folder" in refusal(str(odd))


def test_a_file_is_read_within_its_bound(folder: Path) -> None:
    (folder / "x.jinja").write_bytes(b"\xe9")
    with pytest.raises(ModelError, match="not text in UTF-8"):
        files.read_text(folder / "x.jinja")
    with (folder / "x.jinja").open("ab") as file:
        file.truncate(5 * 2**20)
    with pytest.raises(ModelError, match="at most 4194304 are read"):
        files.read_file(folder / "x.jinja")
    os.mkfifo(folder / "y.jinja")
    with pytest.raises(ModelError, match="not a regular file"):
        files.read_file(folder / "y.jinja")


# --- config.json alone -----------------------------------------------------------------------------------------------


def test_of_a_hub_model_the_configuration_alone_can_be_fetched(
    folder: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def download(*names: str, **options: Any) -> str:
        calls.append((*names, options["revision"], options["local_files_only"]))
        return str(folder / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve_config("owner/name", revision="v2") == folder
    assert resolve_config("owner/name", offline=True) == folder
    fake.look_up = httpx2.ConnectError("no network")
    assert resolve_config("owner/name") == folder
    assert [(name, local) for _, _, name, local in calls] == [("v2", False), (None, True), (None, True)]


def test_the_files_that_describe_quantised_weights_are_fetched_with_the_configuration(
    folder: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.files |= {"hf_quant_config.json": 1}

    def download(_: str, name: str, **__: Any) -> str:
        if name != "config.json":
            (folder / name).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    quantization = quantization_in(resolve_config("owner/name"))
    assert quantization is not None
    assert quantization.kind == "modelopt"
    assert not (folder / "quant_config.json").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("no"), "is neither in the cache"),
        (http_error(errors.RemoteEntryNotFoundError, 404), "has no config.json"),
        (http_error(errors.GatedRepoError, 403), "is gated"),
        (errors.HFValidationError("no"), "neither a folder here nor a name on the hub"),
    ],
)
def test_a_configuration_that_cannot_be_had_is_one_sentence(
    error: Exception, words: str, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: str, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ModelError, match=words):
        resolve_config("owner/name")


def test_a_folder_needs_no_weights_to_be_described(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_config(str(tmp_path)) == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="so it is not a model folder"):
        resolve_config(str(tmp_path))
