"""From what the user wrote as MODEL to a folder on this machine."""

from pathlib import Path

from moeserve.models.errors import ModelError
from moeserve.models.folder import check_folder
from moeserve.models.progress import Progress, silent

__all__ = ["ModelError", "resolve_model"]


def resolve_model(
    model: str | None,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the folder that holds `model`: a local folder, a model of the hub, or for None the demo model.

    cache_dir: where the demo is built or the hub's models are kept; default is each one's own cache. offline: use
    only what is on this machine. Raises ModelError, whose message is one sentence for the user.
    """
    report = progress or silent
    if model is None:
        from moeserve.models.demo.cache import ensure_demo

        _refuse_revision(revision, "the demo model")
        return check_folder(ensure_demo(cache_dir, progress=report))
    if _is_path(model):
        _refuse_revision(revision, f"the folder {model}")
        path = Path(model).expanduser()
        if not path.exists():
            raise ModelError(f"There is no folder {path}.")
        return check_folder(path)
    from moeserve.models.hub import download

    return check_folder(download(model, revision=revision, offline=offline, cache_dir=cache_dir, report=report))


def _is_path(model: str) -> bool:
    """A name of the hub has at most one slash and never starts like a path; whatever exists here is meant as a path."""
    return (
        model.startswith(("/", "./", "../", "~"))
        or model in ("", ".", "..")
        or model.count("/") > 1
        or model.endswith("/")
        or Path(model).exists()
    )


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise ModelError(f"A revision ({revision}) can be chosen of a model of the hub, but not of {what}.")
