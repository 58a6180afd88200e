"""Reading a model folder's ``config.json`` into a complete, plain configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeserve.models.errors import ModelError
from moeserve.models.families import OWN_MODEL_TYPES, check_model_type


def load_config(directory: Path) -> dict[str, Any]:
    """Return the configuration with every default of its model type filled in.

    Raises UnsupportedModel for a type that is not served and ModelError for a file that is missing or not valid.
    transformers is imported for its configuration classes only; code that lies in the folder is never run, because
    the class is chosen from the installed ones by ``model_type`` and ``auto_map`` is not looked at.
    """
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"There is no config.json in {directory}.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    model_type = check_model_type(raw.get("model_type"))

    if model_type in OWN_MODEL_TYPES:
        return raw

    # Imported here: it takes most of a second, and only the process that loads the model needs it.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw.pop("auto_map", None)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(raw).to_dict()
    except Exception as error:  # Each configuration class has its own validators with their own exception types.
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} is not a valid {model_type} configuration: {reason}") from error
    return {**config, "quantization_config": raw.get("quantization_config")}
