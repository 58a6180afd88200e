"""A GGUF file as a model folder: the small files that every part of the service reads, made once beside the cache.

The weights stay in their file; `gguf.json` in the folder says where that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from moeserve.config import cache_root
from moeserve.model.cache import Identity, ensure_built, identity_of
from moeserve.model.families import build_spec, is_native, load_config, read_config
from moeserve.model.files import GGUF_POINTER, check_file, read_file
from moeserve.model.gguf.architectures import config_of
from moeserve.model.gguf.config import Fields, generation_config_of, num_layers
from moeserve.model.gguf.further import further_builder
from moeserve.model.gguf.header import GgufHeader, read_gguf
from moeserve.model.gguf.native import NeededNames, native_parts
from moeserve.model.gguf.parts import GgufPart, parts_of
from moeserve.model.gguf.tokenizer import build_tokenizer, tokenizer_config_of
from moeserve.model.spec import DecoderSpec, ModelError, Progress, silent

# The version of the files in the folder: raise it when their content changes, and new folders are made.
_VERSION = 7
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class _Pointer(msgspec.Struct, frozen=True):
    """A file of weights, and what distinguishes it from a later file at its path."""

    path: str
    identity: Identity

    @classmethod
    def to(cls, file: Path) -> _Pointer:
        return cls(str(file.absolute()), identity_of(file.stat()))


def gguf_folder(path: Path, cache: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a model folder for a GGUF file, or for the split model that the file is a part of.

    tokenizer.json, tokenizer_config.json and chat_template.jinja beside the file are taken instead of the file's own.
    Raise ModelError.
    """
    header = read_gguf(path)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ModelError(f"The path {str(path)!a} is not UTF-8: rename the file or its folder.") from None
    digest = hashlib.sha256(f"{_VERSION}\n".encode())
    beside = [path.parent / name for name in _BESIDE if (path.parent / name).is_file()]
    for file in (*header.files, *beside):
        digest.update(msgspec.json.encode(_Pointer.to(file)))
    root = cache or cache_root() / "gguf"
    return ensure_built(
        root / f"{path.stem}-{digest.hexdigest()[:16]}",
        builder=f"moeserve gguf folder {_VERSION}",
        build=lambda folder, _: _write(folder, header, beside),
        bytes_needed=0,
        progress=progress or silent,
        advice="set XDG_CACHE_HOME to a folder that can be",
    )


def _write(folder: Path, header: GgufHeader, beside: list[Path]) -> None:
    folder.mkdir(parents=True)
    metadata = header.metadata
    contents = {
        "config.json": config_of(header),
        "generation_config.json": generation_config_of(header),
        "tokenizer_config.json": tokenizer_config_of(metadata),
        GGUF_POINTER: [_Pointer.to(file) for file in header.files],
    }
    taken = {file.name for file in beside}
    for name, content in contents.items():
        if name not in taken:
            (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    if "tokenizer.json" not in taken:
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    for file in beside:
        (folder / file.name).write_bytes(read_file(file))


def gguf_files(folder: Path) -> list[Path]:
    """Return the files of weights. Raise ModelError if one is gone, or not the file for which the folder was made."""
    try:
        pointers = msgspec.json.decode(read_file(folder / GGUF_POINTER), type=list[_Pointer])
    except msgspec.MsgspecError:
        raise ModelError(f"{folder / GGUF_POINTER} is damaged: delete {folder}.") from None
    for pointer in pointers:
        check_file(Path(pointer.path))
        if _Pointer.to(Path(pointer.path)) != pointer:
            raise ModelError(f"{pointer.path} has changed since the start of the service.")
    return [Path(pointer.path) for pointer in pointers]


def gguf_parts(folder: Path, needed: Callable[[DecoderSpec], NeededNames]) -> Iterator[tuple[str, GgufPart]]:
    """Yield every tensor of the model by its name in a checkpoint, or in the file for a model on transformers' code.

    needed: returns the names of a decoder's tensors. Raise CheckpointError.
    """
    header = read_gguf(gguf_files(folder)[0])
    fields = Fields(header)
    if further_builder(fields) is None:
        return parts_of(header, fields, num_layers(fields))
    if is_native(read_config(folder), "auto"):
        return native_parts(fields, needed(build_spec(load_config(folder))))
    return ((name, GgufPart((tensor,))) for name, tensor in header.tensors.items())
