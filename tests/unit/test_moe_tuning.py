"""Files of tuned configurations: which one is used, what is refused, and what the log says of it."""

import json
import logging
from dataclasses import replace

import pytest

from kernels.gpu.moe_config import (
    PACKAGED,
    Device,
    MoeConfigs,
    MoeShape,
    Platform,
    Tile,
    TuningError,
    file_name,
    heuristic_config,
    nearest,
    read_tuned,
    write_tuned,
)

SHAPE = MoeShape(128, 768, 2048, 8, "bfloat16")
HOPPER = Device(shared_bytes=227 << 10, num_multiprocessors=132, has_descriptors=True)
PLATFORM = Platform("NVIDIA H200", "3.6.0")
OWN_TILE = Tile(64, 64, 1, 4, 2)


def tuned_config(num_tokens):
    return replace(heuristic_config(SHAPE, num_tokens, HOPPER), gate_up=OWN_TILE, down=OWN_TILE)


def write(folder, shape=SHAPE, platform=PLATFORM, num_tokens=(1, 64, 1024)):
    path = folder / file_name(SHAPE, PLATFORM)
    configs = {tokens: tuned_config(tokens) for tokens in num_tokens}
    write_tuned(path, shape, platform, configs, dict.fromkeys(num_tokens, 12.34))
    return path


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    path = write(tmp_path)
    assert path.name == "moe-e128-i768-h2048-k8-bfloat16--nvidia-h200--triton-3.6.json"
    assert read_tuned(path, SHAPE, PLATFORM, HOPPER) == {tokens: tuned_config(tokens) for tokens in (1, 64, 1024)}
    assert json.loads(path.read_text())["configs"]["64"]["microseconds"] == 12.3


def test_a_patch_release_of_triton_does_not_matter_but_a_minor_one_does(tmp_path):
    path = write(tmp_path)
    assert read_tuned(path, SHAPE, Platform("NVIDIA H200", "3.6.1"), HOPPER)
    with pytest.raises(TuningError, match="is for"):
        read_tuned(path, SHAPE, Platform("NVIDIA H200", "3.7.0"), HOPPER)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1}', '{"format": 1, "shape": "x", "gpu": "y", "triton": "3.6", "configs": []}'],
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(TuningError, match=r"broken\.json"):
        read_tuned(path, SHAPE, PLATFORM, HOPPER)


WIDE_TILE = {"block_n": 256, "block_k": 64, "group_m": 1, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize("change", [{"block_m": 17}, {"block_m": 128, "gate_up": WIDE_TILE}], ids=str)
def test_configurations_that_cannot_run_are_refused(tmp_path, change):
    path = write(tmp_path)
    fields = json.loads(path.read_text())
    fields["configs"]["64"] |= change
    path.write_text(json.dumps(fields))
    with pytest.raises(TuningError, match="cannot run"):
        read_tuned(path, SHAPE, PLATFORM, HOPPER)


def test_the_nearest_size_is_near_by_ratio():
    tuned = {tokens: tuned_config(tokens) for tokens in (1, 64, 1024)}
    assert nearest(7, tuned) is tuned[1]
    assert nearest(8, tuned) is tuned[64]
    assert nearest(200, tuned) is tuned[64]
    assert nearest(9999, tuned) is tuned[1024]


def test_the_first_folder_with_a_good_file_serves_and_the_log_names_it_once(tmp_path, caplog):
    broken, good = tmp_path / "user", tmp_path / "packaged"
    broken.mkdir()
    (broken / file_name(SHAPE, PLATFORM)).write_text("{")
    path = write(good)
    configs = MoeConfigs(SHAPE, HOPPER, PLATFORM, (tmp_path / "missing", broken, good))
    with caplog.at_level(logging.INFO, logger="kernels.gpu.moe_config"):
        assert configs(60) == tuned_config(64)
        assert configs(1) == tuned_config(1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert str(path) in caplog.messages[1]


def test_without_a_file_the_heuristic_serves_and_the_log_says_so_once(tmp_path, caplog):
    configs = MoeConfigs(SHAPE, HOPPER, PLATFORM, (tmp_path,))
    for num_tokens in (1, 64, 64, 4096):
        assert configs(num_tokens) == heuristic_config(SHAPE, num_tokens, HOPPER)
    assert len(caplog.messages) == 1
    assert "untuned" in caplog.messages[0]
    assert "moeserve tune" in caplog.messages[0]


def test_packaged_files_are_in_order():
    for path in PACKAGED.glob("*.json"):
        fields = json.loads(path.read_text())
        assert path.name.startswith(fields["shape"])
