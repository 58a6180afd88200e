"""From the user's MODEL to a checked folder on this machine: a local folder, the hub's, or the demo's.

Of a hub model only configs, tokenizers, templates and safetensors weights are fetched, into the hub library's own
cache: never code, never pickles.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve.model.cache import is_recorded, verify
from moeserve.model.checkpoint import has_weights
from moeserve.model.demo import SPLIT_NAME, demo_named, ensure_demo, ensure_split_demo
from moeserve.model.files import check_file, is_gguf_folder, read_json, size_bound
from moeserve.model.generation import load_generation_defaults
from moeserve.model.gguf.hub import (
    choose_files,
    kinds_of,
    models_of,
    only_files_sentence,
    only_gguf_sentence,
    split_name,
)
from moeserve.model.packed.config import DESCRIPTIONS
from moeserve.model.spec import ModelError, Progress, silent
from moeserve.settings.quantities import show_size

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

_INDEX_NAME = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_ALLOW = ["*.json", "*.safetensors", "*.jinja"]
# Other exports in subfolders, and a second copy of the weights under other names in some repositories.
_IGNORE = ["*/*", "consolidated*"]
_NO_NAME = "{model!r} is neither a folder here nor a name on the hub (like owner/name)."


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder that holds `model`: a local folder, a model of the hub, or a demo; None is the demo.

    cache_dir: where to build the demo or keep hub models; the default is the cache of each. offline: use only files on
    this machine. Raise ModelError.
    """
    report = progress or silent
    if (name := demo_named(model)) is not None:
        _refuse_revision(revision, "the demo model")
        ensure = ensure_split_demo if name == SPLIT_NAME else ensure_demo
        return check_folder(ensure(cache_dir, progress=report))
    assert model is not None
    if _is_path(model):
        _refuse_revision(revision, f"the folder {model}")
        path = _expanded(model)
        if not path.exists():
            raise ModelError(_no_folder(path))
        if path.suffix == ".gguf":
            return check_folder(_gguf_folder(path, report))
        check_folder(path)
        if is_recorded(path):
            verify(path, progress=report)
        return path
    found = _download(model, revision=revision, offline=offline, cache_dir=cache_dir, report=report)
    return check_folder(_gguf_folder(found, report) if found.suffix == ".gguf" else found)


def _gguf_folder(path: Path, report: Progress) -> Path:
    from moeserve.model.gguf.folder import gguf_folder  # Imported late: reading GGUF takes numpy.

    return gguf_folder(path, progress=report)


def _no_folder(path: Path) -> str:
    kind = "file" if path.suffix == ".gguf" else "folder"
    return f"The link {path} leads to no {kind}." if path.is_symlink() else f"There is no {kind} {path}."


def resolve_config(model: str, *, revision: str | None = None, offline: bool = False) -> Path:
    """Return a folder that holds the `config.json` of `model`, a local folder or a model of the hub, and perhaps more.

    Of a hub model no more is fetched than that and the files beside it that describe how weights are quantised. Raise
    ModelError.
    """
    if demo_named(model) is not None:
        return resolve_model(model, revision=revision)
    if _is_path(model):
        _refuse_revision(revision, f"the folder {model}")
        path = _expanded(model)
        if path.suffix == ".gguf" and path.exists():
            return _gguf_folder(path, silent)
        if not path.is_dir():
            raise ModelError(_no_folder(path))
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json, so it is not a model folder.")
        return path
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cache, (name, kind) = Path(constants.HF_HUB_CACHE), split_name(model)
    if kind is not None:
        return _gguf_folder(_cached(name, kind, revision, cache, "a GGUF file is described once it is here"), silent)
    with _as_model_errors(model, revision, cache):
        try:
            # The hub library asks a hub that cannot be reached again for half a minute, the look does not.
            info = None if offline or constants.HF_HUB_OFFLINE else _look_up(model, revision)[0]
            present = {} if info is None else _sizes_in(info)
            for name in ("config.json", *(name for name in DESCRIPTIONS if name in present)):
                path = Path(hf_hub_download(model, name, revision=revision, local_files_only=info is None))
            return path.parent
        except LocalEntryNotFoundError:
            raise ModelError(
                f"The config.json of model {model} is neither in the cache {cache} nor can the hub be asked for it."
            ) from None
        except EntryNotFoundError:
            raise ModelError(f"Model {model} has no config.json, so it cannot be served.") from None


def local_gguf_models(model: str) -> list[list[Path]]:
    """Return the GGUF models in a folder without config.json, the parts of each in order; none of any other MODEL."""
    folder = _expanded(model)
    if not _is_path(model) or not folder.is_dir() or (folder / "config.json").exists():
        return []
    return [[folder / name for name in names] for names in models_of(path.name for path in folder.glob("*.gguf"))]


def hub_gguf_sizes(model: str, *, revision: str | None, offline: bool) -> tuple[dict[str, int], list[str]]:
    """Return the bytes of each kind of GGUF model in a hub repository that has no other weights, and the repositories
    that may have its config.json. Where the hub cannot be asked, those in the cache count. Raise ModelError.
    """
    from huggingface_hub import constants

    local = demo_named(model) is not None or _is_path(model) or split_name(model)[1] is not None
    if local:
        return {}, []
    cache = Path(constants.HF_HUB_CACHE)
    with _as_model_errors(model, revision, cache):
        info = None if offline or constants.HF_HUB_OFFLINE else _look_up(model, revision)[0]
        sizes = _cached_sizes(model, revision, cache) if info is None else _sizes_in(info)
    if any(name.endswith(".safetensors") for name in sizes):
        return {}, []
    base = (getattr(info, "card_data", None) or {}).get("base_model") or []
    found = {kind: sum(sizes[name] for name in names) for kind, names in kinds_of(sizes).items()}
    return found, [model, *([base] if isinstance(base, str) else base)]


def _sizes_in(info: ModelInfo) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings or []}


def _cached_sizes(model: str, revision: str | None, cache: Path) -> dict[str, int]:
    """Return the bytes of the files of a hub model in the cache; nothing where it is not there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _fetch(model, revision, cache, None, local=True)
    except LocalEntryNotFoundError:
        return {}
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _is_path(model: str) -> bool:
    """Tell a path from a hub name, which has at most one slash and never starts like a path. Anything that exists is a
    path."""
    return (
        model.startswith(("/", "./", "../", "~"))
        or model in ("", ".", "..")
        or model.count("/") > 1
        or model.endswith("/")
        or (model.endswith(".gguf") and ":" not in model)
        or Path(model).exists()
    )


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:
        raise ModelError(
            f"{model} begins with ~, and this account has no home: set HOME or write the path out."
        ) from None


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"A revision ({revision}) can be chosen of a model of the hub, but not of {what}.")


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a config, safetensors weights (all shards of the index) and a tokenizer.

    Do not read weights. Raise ModelError, which names the first thing that is missing.
    """
    try:
        _check_encodable(folder)
        if not folder.exists():
            raise ModelError(_no_folder(folder))
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: name the folder that holds the model's config.json.")
        _check_files_of(folder)
        if not (folder / "config.json").exists():
            sentence = only_files_sentence(str(folder), (path.name for path in folder.glob("*.gguf")))
            raise ModelError(sentence or f"{folder} has no config.json, so it is not a model folder.")
        read_json(folder / "config.json")
        load_generation_defaults(folder)
        _check_weights(folder)
        if not (folder / "tokenizer.json").exists():
            raise ModelError(
                f"{folder} has no tokenizer.json: convert the model's tokenizer to a fast one and save it there."
            )
    except OSError as error:
        raise ModelError(f"{error.filename or folder} cannot be read ({error.strerror}).") from error
    return folder


def _check_encodable(folder: Path) -> None:
    """Raise ModelError for a path that JSON and messages cannot hold."""
    try:
        str(folder.absolute()).encode("utf-8")
    except UnicodeEncodeError:
        shown = os.fsencode(folder).decode("utf-8", "backslashreplace")
        raise ModelError(f"The path {shown} is not UTF-8: rename the folder.") from None


def _check_files_of(folder: Path) -> None:
    """Raise ModelError for a file that would be read but is not a regular file, is too large or not readable.

    Nothing is read, so a pipe or an endless file costs nothing.
    """
    folders = [folder, folder / "additional_chat_templates"]
    for path in (path for place in folders if place.is_dir() for path in sorted(place.iterdir())):
        bound = size_bound(path)
        if bound is None and path.suffix != ".safetensors":
            continue
        size = check_file(path)
        if bound is not None and size > bound:
            raise ModelError(f"{path} has {size} bytes; at most {bound} are read.")
        if not os.access(path, os.R_OK):
            raise ModelError(f"{path} cannot be read (Permission denied).")


def _check_weights(folder: Path) -> None:
    if (folder / _INDEX_NAME).is_file():
        _check_shards(folder)
    elif is_gguf_folder(folder):
        from moeserve.model.gguf.folder import gguf_files

        gguf_files(folder)
    elif not has_weights(folder):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise ModelError(_pickle_sentence(str(folder), pickles[0]))
        raise ModelError(f"{folder} has no weights: there is no *.safetensors file in it.")


def _pickle_sentence(where: str, example: str) -> str:
    return (
        f"{where} has its weights only in a pickle format ({example}), which can run code when it is read: "
        "convert them to safetensors."
    )


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def _check_shards(folder: Path) -> None:
    path = folder / _INDEX_NAME
    try:
        shards = sorted(set(msgspec.convert(read_json(path), _Index).weight_map.values()))
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} is not an index of weight files ({error}).") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(shards)} weight files, the first is {missing[0]}.")


def _download(model: str, *, revision: str | None, offline: bool, cache_dir: Path | None, report: Progress) -> Path:
    """Return the folder of a hub model at `revision` (default: the main branch), or the first file of the GGUF model
    that `owner/name:KIND` names. Fetch missing files.

    Resume an interrupted download. Without a network, or with `offline` or HF_HUB_OFFLINE, a complete copy in the cache
    is enough. cache_dir: the hub library's by default. Raise ModelError.
    """
    from huggingface_hub import constants

    cache, (name, kind) = cache_dir or Path(constants.HF_HUB_CACHE), split_name(model)
    if offline or constants.HF_HUB_OFFLINE:
        return _cached(name, kind, revision, cache, "offline mode is on")
    report("look up model", 0, 0)
    with _as_model_errors(name, revision, cache):
        info, trouble = _look_up(name, revision)
        if info is None:
            return _cached(name, kind, revision, cache, f"the hub cannot be reached ({trouble})")
        folder, files = _fetch_missing(name, kind, revision, info, cache, report)
        return folder if kind is None else folder / files[0]


def pull_model(model: str, *, revision: str | None, progress: Progress) -> Path:
    """Fetch the missing files of a hub model and compare all its files with the hub's checksums.

    model: `owner/name`, `owner/name:KIND` or `owner/name:FILE.gguf`. Return the folder, or the first GGUF file. Resume
    an interrupted download. Raise ModelError, also where only the cache could be asked.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    name, kind = split_name(model)
    if _is_path(name):
        raise ModelError(f"{model} is a path on this machine: name a model of the hub, as owner/name.")
    if constants.HF_HUB_OFFLINE:
        raise ModelError("HF_HUB_OFFLINE is set, so nothing can be fetched.")
    progress("look up model", 0, 0)
    with _as_model_errors(name, revision, cache):
        info, trouble = _look_up(name, revision)
        if info is None:
            raise ModelError(f"The hub cannot be reached ({trouble}), so model {model} cannot be fetched.")
        folder, files = _fetch_missing(name, kind, revision, info, cache, progress)
        chosen = set(files)
        check_sums(folder, [file for file in info.siblings or [] if file.rfilename in chosen], progress)
    return check_folder(folder) if kind is None else folder / files[0]


def _fetch_missing(
    name: str, kind: str | None, revision: str | None, info: ModelInfo, cache: Path, report: Progress
) -> tuple[Path, list[str]]:
    """Return the folder and the names of the model's files, which lie there now."""
    sizes = _sizes_in(info)
    files = _files_of(name, sizes) if kind is None else choose_files(name, kind, sizes)
    missing = _missing_bytes(name, {file: sizes[file] for file in files}, info, cache)
    _check_disk(name, missing, cache)
    bars = _progress_bar_class(report, missing) if missing else None
    return _fetch(name, revision, cache, bars, None if kind is None else files), files


def _look_up(model: str, revision: str | None) -> tuple[ModelInfo | None, str]:
    """Return the hub's list of files, or None and the reason why the hub cannot be reached."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return HfApi().model_info(model, revision=revision, files_metadata=True), ""
    except (httpx2.TransportError, OfflineModeIsEnabled) as error:
        return None, str(error) or type(error).__name__
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status != 429 and status < 500:
            raise
        return None, f"HTTP status {status}"


def _files_of(model: str, names: Collection[str]) -> list[str]:
    """Return the files to fetch. Raise ModelError if the repository cannot be served at all."""
    wanted = [name for name in names if _is_wanted(name)]
    if not any(name.endswith(".safetensors") for name in wanted):
        if sentence := only_gguf_sentence(model, names):
            raise ModelError(sentence)
        pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
        if pickles:
            raise ModelError(_pickle_sentence(f"Model {model}", pickles[0]))
        raise ModelError(f"Model {model} has no safetensors weights, so it cannot be served.")
    for needed in ("config.json", "tokenizer.json"):
        if needed not in wanted:
            raise ModelError(f"Model {model} has no {needed}, so it cannot be served.")
    return wanted


def _missing_bytes(model: str, sizes: Mapping[str, int], info: ModelInfo, cache: Path) -> int:
    from huggingface_hub import try_to_load_from_cache

    return sum(
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(model, name, cache_dir=cache, revision=info.sha), str)
    )


def _is_wanted(name: str) -> bool:
    """Tell if the patterns select the file, matched as the hub library matches them."""
    return any(fnmatch(name, pattern) for pattern in _ALLOW) and not any(fnmatch(name, p) for p in _IGNORE)


def _check_disk(model: str, missing: int, cache: Path) -> None:
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise ModelError(
            f"Model {model} needs {show_size(missing, up=True)} more in {cache}, but only {show_size(free)} are free "
            "there: "
            "free some space or set HF_HOME to a folder on a larger disk."
        )


def _fetch(
    model: str,
    revision: str | None,
    cache: Path,
    bars: type | None,
    files: list[str] | None = None,
    *,
    local: bool = False,
) -> Path:
    """files: alone to fetch, all of a model of safetensors if None."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        model,
        revision=revision,
        cache_dir=cache,
        allow_patterns=_ALLOW if files is None else files,
        ignore_patterns=_IGNORE if files is None else None,
        local_files_only=local,
        tqdm_class=bars,
    )
    return Path(folder)


def _cached(model: str, kind: str | None, revision: str | None, cache: Path, reason: str) -> Path:
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _fetch(model, revision, cache, None, local=True)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if kind is None:
            if not (folder / "config.json").exists() and (sentence := only_gguf_sentence(model, names)):
                raise ModelError(sentence)
            return folder
        return folder / choose_files(model, kind, names)[0]
    except HFValidationError as error:
        raise ModelError(_NO_NAME.format(model=model)) from error
    except LocalEntryNotFoundError as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"Model {model}{at} is not completely in the cache {cache}, and {reason}: start once with a network to "
            "download it."
        ) from error


@contextmanager
def _as_model_errors(model: str, revision: str | None, cache: Path) -> Iterator[None]:
    """Turn the errors of the hub library into ModelErrors."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(_NO_NAME.format(model=model)) from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"Model {model} is gated: accept its conditions on its hub page, then set HF_TOKEN to a token of "
            "that account."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"There is neither a folder {model!r} here nor a public model of that name on the hub: check the name, "
            "or set HF_TOKEN to a token that may read it if it is private."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"Model {model} has no revision {revision!r} (branch, tag or commit).") from error
    except errors.HfHubHTTPError as error:
        said = error.server_message or f"HTTP status {error.response.status_code}"
        raise ModelError(f"The hub refused model {model}: {said}.") from error
    except (httpx2.TransportError, errors.LocalEntryNotFoundError, errors.XetDownloadError) as error:
        raise ModelError(
            f"The download of model {model} broke off ({type(error).__name__}): start again to resume it."
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"The disk ran full while model {model} was downloaded into {cache}.") from error
        raise ModelError(f"Model {model} cannot be stored in {cache} ({error.strerror or error}).") from error


def _progress_bar_class(report: Progress, total: int) -> type:
    """Return a progress bar class for the hub library that draws nothing and reports the bytes that have arrived."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    arrived: dict[int, int] = {}

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **(kwargs | {"disable": True}))

        def update(self, n: float | None = 1) -> None:
            if not self._counts_bytes:
                return
            # The library counts bytes received and bytes written on two bars; the larger count is right.
            with lock:
                arrived[id(self)] = arrived.get(id(self), 0) + int(n or 0)
                report("download", min(max(arrived.values()), total), total)

    return Bar


_PIECE_BYTES = 2**22  # read at a time


def check_sums(folder: Path, files: Sequence[RepoSibling], report: Progress) -> None:
    """Compare files in a folder of the hub library's cache with their checksums.

    Large files have a sha256, others the sha1 that git gives them. Remove files that differ, with the copies that the
    cache's links lead to, and raise ModelError.
    """
    total, done, damaged = sum(file.size or 0 for file in files), 0, []
    for file in files:
        path, expected = folder / file.rfilename, file.blob_id
        if file.lfs is not None:
            expected, digest = file.lfs.sha256, hashlib.sha256()
        else:
            digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
        with path.open("rb") as content:
            while piece := content.read(_PIECE_BYTES):
                digest.update(piece)
                done += len(piece)
                report("verify", min(done, total), total)
        if expected is not None and digest.hexdigest() != expected:
            damaged.append(file.rfilename)
            path.resolve().unlink()
            path.unlink(missing_ok=True)
    if damaged:
        raise ModelError(
            f"{len(damaged)} of {len(files)} files differ from the hub's checksums, the first is {damaged[0]}: they "
            "are removed, pull again to fetch them anew."
        )
