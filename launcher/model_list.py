"""`moeserve list`: the models in the hub library's cache, their sizes, and whether they fit this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.preflight import usable_cores
from moeserve.config import ServeConfig
from moeserve.model.gguf.hub import kinds_of
from moeserve.model.spec import ModelError
from moeserve.settings.quantities import show_size

if TYPE_CHECKING:
    from moeserve.machine import Machine


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. name: for `moeserve serve`. parts: of a GGUF model, none of a folder of safetensors."""

    name: str
    num_bytes: int
    folder: Path
    parts: tuple[Path, ...] = ()


@click.command(name="list")
def list_models() -> None:
    """List the models that were fetched from the hub, their sizes, and whether they fit this machine."""
    from moeserve.machine import read_machine

    models = cached_models()
    if not models:
        click.echo("No model was fetched yet: `moeserve pull owner/name:Q4_K_M` fetches one.")
        return
    machine = read_machine(usable_cores())
    width = max(len(model.name) for model in models)
    for model in models:
        click.echo(f"{model.name:<{width}}  {show_size(model.num_bytes):>9}  {said_fit(model, machine, ServeConfig())}")


def cached_models() -> list[CachedModel]:
    """Return the models in the hub library's cache by name, each in its latest revision."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = [
            repo
            for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos
            if repo.repo_type == "model" and repo.revisions
        ]
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        revision = max(repository.revisions, key=lambda one: one.last_modified)
        folder = revision.snapshot_path
        sizes = {str(file.file_path.relative_to(folder)): file.size_on_disk for file in revision.files}
        for kind, names in kinds_of(sizes).items():
            parts = tuple(folder / name for name in names)
            name = f"{repository.repo_id}:{kind}"
            found.append(CachedModel(name, sum(sizes[name] for name in names), folder, parts))
        weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
        if weights:
            found.append(CachedModel(repository.repo_id, weights, folder))
    return sorted(found, key=lambda model: model.name)


def said_fit(model: CachedModel, machine: Machine, config: ServeConfig) -> str:
    """Return whether a model fits a machine, and with how much context, in words."""
    from moeserve.engine.doctor import setups_of
    from moeserve.engine.gguf_choice import choices_here
    from moeserve.engine.known_model import examine

    if model.parts:
        (choice,) = choices_here([model.parts], machine, config)
        obstacle, tokens, flags = choice.obstacle, choice.kv_tokens or 0, ""
    else:
        try:
            setup = setups_of(examine(model.folder), machine, config)[-1]
        except ModelError as error:
            return f"cannot be served: {error}"
        obstacle, tokens, flags = setup.obstacle, setup.kv_tokens, " ".join(setup.flags)
    if obstacle is not None:
        return f"does not fit: {obstacle}"
    return f"fits{f' with {flags}' if flags else ''}, {tokens:,} tokens of keys and values beside it"
