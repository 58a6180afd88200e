"""docs/configuration.md, the example file and the dataclass say the same."""

import tomllib
from dataclasses import fields
from pathlib import Path

from launcher.settings_table import settings_table
from moeserve.config import ServeConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_in_the_docs_is_the_dataclass():
    document = (ROOT / "docs" / "configuration.md").read_text()
    assert settings_table() in document, "paste the output of `python -m launcher.settings_table` into the document"


def test_the_example_file_sets_known_settings_to_valid_values():
    load_config({}, {}, ROOT / "examples" / "moeserve.toml")


def test_the_example_file_shows_every_setting():
    text = (ROOT / "examples" / "moeserve.toml").read_text()
    shown = tomllib.loads("\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line))
    assert {key.replace("-", "_") for key in shown} == {setting.name for setting in fields(ServeConfig)}
