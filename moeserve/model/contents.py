"""The files of a model that its bits and its texts depend on. Torch-free.

Their path and times change nothing, nor do other files beside them (a README, a licence): the same model elsewhere has
the same digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from moeserve.model.dummy import DUMMY, is_dummy_folder
from moeserve.model.files import is_gguf_folder, read_file
from moeserve.model.packed.config import DESCRIPTIONS
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import weight_files

_CONFIGURATION = ("config.json", *DESCRIPTIONS)
_TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)

# Returns the hash of each file.
HashFiles = Callable[[Sequence[Path]], Iterable[str]]


def model_digest(folder: Path, hash_weights: HashFiles, *, with_texts: bool = True) -> bytes:
    """Return a digest (32 bytes) of a model's configuration and weights, and `with_texts` of its tokenizer, templates
    and defaults of generation.

    hash_weights: `whole_hashes`, or `sampled_hashes` where nothing that is kept is taken for this model's. Raise
    ModelError for files that are missing or cannot be read.
    """
    digest = hashlib.sha256()

    def add(role: str, content_hash: str) -> None:
        digest.update(f"{role}\0{content_hash}\n".encode())

    try:
        for name in (*_CONFIGURATION, *(_TEXTS if with_texts else ())):
            if (folder / name).is_file():
                add(name, hashlib.sha256(read_file(folder / name)).hexdigest())
        # By their order and not by name: the file of a GGUF model may have any.
        for number, content_hash in enumerate(hash_weights(_weight_files(folder))):
            add(f"weights {number}", content_hash)
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder} cannot be read ({error.strerror}).") from error
    return digest.digest()


def _weight_files(folder: Path) -> list[Path]:
    if is_gguf_folder(folder):
        from moeserve.model.gguf.folder import gguf_files  # Imported late: other checkpoints do without its packages.

        return gguf_files(folder)
    return [folder / DUMMY] if is_dummy_folder(folder) else weight_files(folder)
