"""What a folder must hold before it is worth starting a worker on it."""

from pathlib import Path

import msgspec

from moeserve.models.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def check_folder(folder: Path) -> Path:
    """Return `folder` if it holds a config, safetensors weights (all shards of the index) and a tokenizer.

    Contents of weights are not read. Raises ModelError naming the first thing missing.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: name the folder that holds the model's config.json.")
    _check_config(folder / "config.json")
    _check_weights(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: convert the model's tokenizer to a fast one and save it there."
        )
    return folder


def _check_config(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no config.json, so it is not a model folder.")
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}).") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} does not hold a JSON object.")


def _check_weights(folder: Path) -> None:
    if (folder / INDEX_NAME).is_file():
        _check_shards(folder)
    elif not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise ModelError(pickle_sentence(str(folder), pickles[0]))
        raise ModelError(f"{folder} has no weights: there is no *.safetensors file in it.")


def pickle_sentence(where: str, example: str) -> str:
    """Why weights in a pickle format are refused."""
    return (
        f"{where} has its weights only in a pickle format ({example}), which can run code when it is read: "
        "convert them to safetensors."
    )


def _check_shards(folder: Path) -> None:
    path = folder / INDEX_NAME
    try:
        shards = sorted(set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not an index of weight files ({error}).") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}).") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {len(missing)} of {len(shards)} weight files, the first is {missing[0]}.")
