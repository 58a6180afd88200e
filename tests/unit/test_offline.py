"""Settings in Python become flags of the command line."""

import pytest

from launcher.offline import LLM
from launcher.settings_options import serve_arguments


def test_settings_are_those_of_serve() -> None:
    settings = {"expert_memory": "4GiB", "bind_cores": False, "offline": True, "rank_devices": ["0", "1"], "seed": None}
    assert serve_arguments(settings) == [
        *("--expert-memory=4GiB", "--no-bind-cores", "--offline", "--rank-devices=0", "--rank-devices=1"),
    ]


def test_port_and_name_are_not_settings() -> None:
    with pytest.raises(TypeError, match="port"):
        LLM(port=8000)
