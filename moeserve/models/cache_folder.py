"""Where this program keeps what it can make again. Nothing but the standard library."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$MOESERVE_CACHE, else $XDG_CACHE_HOME/moeserve, else ~/.cache/moeserve."""
    own = os.environ.get("MOESERVE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "moeserve"
