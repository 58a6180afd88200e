"""Settings from flags, environment and TOML, and their documents."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from moeserve.config import ConfigError, ServeConfig, load_config
from moeserve.settings.generation import parse_generation
from moeserve.settings.quantities import parse_size, show_size
from moeserve.settings.weights import WeightForms
from tests.support.settings_table import settings_table


def toml(folder: Path, text: str) -> Path:
    path = folder / "moeserve.toml"
    path.write_text(text)
    return path


def test_nothing_given_means_the_defaults():
    assert load_config({}, {}) == ServeConfig()


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path):
    file = toml(tmp_path, "port = 1\nblock-size = 2\nmax_num_seqs = 3\n")
    environment = {"MOESERVE_PORT": "11", "MOESERVE_BLOCK_SIZE": "12"}
    config = load_config({"port": "21", "block_size": None}, environment, file)
    assert (config.port, config.block_size, config.max_num_seqs) == (21, 12, 3)


def test_every_kind_of_value_is_read_from_text():
    environment = {
        "MOESERVE_MODEL": "some/model",
        "MOESERVE_OFFLINE": "yes",
        "MOESERVE_ENABLE_PREFIX_CACHING": "off",
        "MOESERVE_KV_CACHE_MEMORY": "1.5GiB",
        "MOESERVE_SHUTDOWN_TIMEOUT": "2.5",
        "MOESERVE_SERVED_MODEL_NAME": "a,b",
    }
    config = load_config({}, environment)
    assert config.model == "some/model"
    assert config.offline
    assert not config.enable_prefix_caching
    assert config.kv_cache_memory == 3 * 2**29
    assert config.shutdown_timeout == 2.5
    assert config.served_model_name == ("a", "b")


def test_a_file_gives_native_values_and_sizes_as_text(tmp_path):
    file = toml(tmp_path, 'offline = true\nkv-cache-memory = "2GB"\nengine-timeout = 3\napi-key = ["x", "y"]\n')
    config = load_config({}, {}, file)
    assert (config.offline, config.kv_cache_memory, config.engine_timeout) == (True, 2 * 10**9, 3.0)
    assert config.api_key == ("x", "y")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"MOESERVE_PORT": "high"}, "MOESERVE_PORT: 'high' is not a whole number"),
        ({"MOESERVE_PORT": "70000"}, "MOESERVE_PORT: 70000 is more than 65535"),
        ({"MOESERVE_MAX_NUM_SEQS": "0"}, "MOESERVE_MAX_NUM_SEQS: 0 is less than 1"),
        ({"MOESERVE_OFFLINE": "maybe"}, "MOESERVE_OFFLINE: 'maybe' is not true or false"),
        ({"MOESERVE_DTYPE": "int3"}, "MOESERVE_DTYPE: 'int3' is not one of auto, float32, bfloat16, float16"),
        ({"MOESERVE_SHUTDOWN_TIMEOUT": "nan"}, "MOESERVE_SHUTDOWN_TIMEOUT: 'nan' is not a number"),
        ({"MOESERVE_KV_CACHE_MEMORY": "lots"}, "MOESERVE_KV_CACHE_MEMORY: 'lots' is not a size such as 512MiB or 2GB"),
        ({"MOESERVE_PROT": "1"}, "MOESERVE_PROT in the environment is no setting; did you mean MOESERVE_PORT?"),
        (
            {"MOESERVE_API_KEYS": "k"},
            "MOESERVE_API_KEYS in the environment is no setting; did you mean MOESERVE_API_KEY?",
        ),
        ({"MOESERVE_XYZZY": "1"}, "MOESERVE_XYZZY in the environment is no setting."),
        ({"MOESERVE_MODEL": " "}, "MOESERVE_MODEL: ' ' is not a text that is not empty"),
    ],
)
def test_a_bad_value_is_refused_with_its_source(environment, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config({}, environment)
    assert str(caught.value) == sentence


def test_what_kubernetes_sets_beside_a_service_of_this_name_is_no_setting():
    links = {"MOESERVE_PORT": "tcp://10.0.0.1:8000", "MOESERVE_SERVICE_HOST": "10.0.0.1", "MOESERVE_SERVICE_PORT": "1"}
    assert load_config({}, {**links, "MOESERVE_PORT_8000_TCP_ADDR": "10.0.0.1"}) == ServeConfig()


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ("https://huggingface.co/owner/name", "owner/name"),
        ("https://huggingface.co/owner/name/tree/main", "owner/name"),
        ("hf.co/owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("https://huggingface.co/owner/name/blob/main/a-Q8_0.gguf?download=true", "owner/name:a-Q8_0.gguf"),
        ("owner/name", "owner/name"),
        ("./folder", "./folder"),
        ("demo", "demo"),
    ],
)
def test_links_to_the_hub_are_its_names(given, model):
    assert load_config({"model": given}, {}).model == model


@pytest.mark.parametrize(
    ("given", "words"), [("qwen3:30b-a3b", "a name of Ollama's library"), ("https://x.example/a", "is a link")]
)
def test_names_that_others_use_are_refused_with_what_to_write(given, words):
    with pytest.raises(ConfigError, match=words):
        load_config({"model": given}, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "unknown setting 'prot'; did you mean port?"),
        ("xyzzy = 1", "unknown setting 'xyzzy'"),
        ("port = 1.5", "1.5 is not a whole number"),
        ("port = true", "True is not a whole number"),
        ("kv-cache-memory = true", "is not a size"),
        ("block-size = 1\nblock_size = 2", "gives block_size twice"),
        ("port = ", "is not valid TOML"),
        ("served-model-name = 3", "must be a list of strings"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=r"moeserve\.toml") as caught:
        load_config({}, {}, toml(tmp_path, text))
    assert words in str(caught.value)


def test_a_missing_file_of_settings_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load_config({}, {}, tmp_path / "none.toml")


def test_a_secret_is_never_shown_in_an_error():
    with pytest.raises(ConfigError) as caught:
        load_config({}, {"MOESERVE_API_KEY": "k1, "})
    assert "k1" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("1k", 1000), ("1KiB", 1024), ("0.5 GiB", 2**29), ("2tb", 2 * 10**12), (7, 7)]
)
def test_sizes_are_read_in_all_spellings(text, count):
    assert parse_size(text) == count


ROOT = Path(__file__).resolve().parents[2]


def test_the_table_in_the_docs_is_the_dataclass():
    document = (ROOT / "docs" / "configuration.md").read_text()
    assert settings_table() in document, "paste the output of `python -m tests.support.settings_table`"


def test_the_example_file_sets_known_settings_to_valid_values():
    load_config({}, {}, ROOT / "examples" / "moeserve.toml")


def test_the_example_file_shows_every_setting():
    text = (ROOT / "examples" / "moeserve.toml").read_text()
    shown = tomllib.loads("\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line))
    assert {key.replace("-", "_") for key in shown} == {setting.name for setting in fields(ServeConfig)}


@pytest.mark.parametrize(
    ("num_bytes", "down", "up"),
    [
        (0, "0 bytes", "0 bytes"),
        (1023, "1023 bytes", "1023 bytes"),
        (2**19 - 1, "511.9 KiB", "512 KiB"),
        (2**19, "512 KiB", "512 KiB"),
        (2**20 + 1, "1 MiB", "1.1 MiB"),
        (65 * 2**30 // 2, "32.5 GiB", "32.5 GiB"),
    ],
)
def test_what_does_not_suffice_never_reads_like_what_is_needed(num_bytes, down, up):
    assert (show_size(num_bytes), show_size(num_bytes, up=True)) == (down, up)


def test_values_for_generation_are_those_of_requests() -> None:
    given = '{"max_new_tokens": 5, "temperature": 0, "top_k": -1}'
    config = load_config({"override_generation_config": given}, {})
    assert parse_generation(config.override_generation_config)["max_new_tokens"] == 5
    bad = ("[]", "{", '{"top_p": 0}', '{"max_new_tokens": 0}', '{"max_new_tokens": true}', '{"eos_token_id": 1}')
    for text in (*bad, '{"temperature": "1"}', '{"temperature": null}'):
        with pytest.raises(ConfigError, match="override-generation-config"):
            load_config({"override_generation_config": text}, {})


@pytest.mark.parametrize(
    ("text", "others", "experts"),
    [
        ("none", "none", "none"),
        ("int8", "int8", "int8"),
        ("experts=fp8", "none", "fp8"),
        ("none,experts=int4", "none", "int4"),
        (" int8 , experts = int4 ", "int8", "int4"),
        ("experts=int4,int8", "int8", "int4"),
    ],
)
def test_one_setting_has_the_form_of_all_weights_and_that_of_the_experts(text: str, others: str, experts: str):
    assert load_config({"quantization": text}, {}).weight_forms == WeightForms(others, experts)


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("in8", "'in8' is not one of none, int8, int4; did you mean int8?"),
        ("experts=in4", "'in4' is not one of int8, fp8, int4; did you mean experts=int4?"),
        ("expert=int4", "'expert' is no part of a model; did you mean experts=int4?"),
        ("int8,int4", "'int8,int4' gives the same weights two forms; write it as int8,experts=int4"),
        ("fp8", "'fp8' is for the experts: experts=fp8; a checkpoint in fp8 stays as it is without"),
        ("AWQ", "'AWQ' is a form of checkpoints, which are read as they are: leave it out"),
        ("experts=Q4_K_M", "'Q4_K_M' is a kind of GGUF file: name it behind the model, as owner/name:Q4_K_M"),
        ("int8,", "'' is not one of none, int8, int4"),
        ("zzz", "'zzz' is not one of none, int8, int4"),
    ],
)
def test_a_form_of_weights_that_there_is_not_is_one_sentence_with_what_to_write(text: str, clause: str):
    with pytest.raises(ConfigError) as caught:
        load_config({"quantization": text}, {})
    assert str(caught.value) == f"--quantization: {clause}"


def test_the_former_setting_of_the_experts_form_leads_to_the_one_of_all_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean MOESERVE_QUANTIZATION\?"):
        load_config({}, {"MOESERVE_EXPERT_QUANTIZATION": "int8"})
    with pytest.raises(ConfigError, match=r"did you mean quantization\?"):
        load_config({}, {}, toml(tmp_path, 'expert-quantization = "int8"'))


def test_a_gpu_has_defaults_of_its_own_and_a_given_value_stays():
    on_cpu, on_gpu = load_config({}, {}), load_config({"device": "cuda"}, {})
    assert (on_cpu.block_size, on_cpu.max_num_seqs) == (16, 64)
    assert (on_gpu.block_size, on_gpu.max_num_seqs) == (64, 256)
    given = load_config({"device": "cuda", "block_size": "16"}, {"MOESERVE_MAX_NUM_SEQS": "64"})
    assert (given.block_size, given.max_num_seqs) == (16, 64)
