"""KV on disk: prefixes are warm after a restart and after a crash, with the same bits, and bad files harm nobody."""

from __future__ import annotations

import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.kills import pid_of
from tests.support.saved_models import saved_model
from tests.support.service import Service, children_of, descendants, is_ready, service, wait_until
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import SPECIALS, TEMPLATE, write_model_dir

# The tiny model's KV takes 4 KiB per block of 16 tokens.
KV_OF_24_BLOCKS = str(24 * 4096)
PROMPT = [3 + i * 7 % 50 for i in range(200)]


def ask(running: Service, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[float], dict[str, int]]:
    """Return the log probabilities of an answer, and where its cached tokens were."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["logprobs"]["token_logprobs"], found["usage"]["cached_tokens_details"]


def wait_for_blocks(running: Service, count: int) -> None:
    wait_until(lambda: running.figure('moeserve_kv_tier_blocks{tier="disk"}') >= count)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if re.fullmatch(r"[0-9a-f]{32}", path.name) and path.is_file())


def test_a_restart_and_kill_9_leave_prefixes_warm_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    settings = ("--kv-disk-path", str(tmp_path / "kv"), "--engine-timeout", "30")
    with service(model, tmp_path / "1", *settings) as running:
        cold, where = ask(running)
        assert where == {"device": 0, "host": 0, "disk": 0}
        # Blocks of the output are kept too.
        wait_for_blocks(running, 13)
        assert ask(running) == (cold, {"device": 192, "host": 0, "disk": 0})
        engine = next(iter(descendants(children_of(running.process.pid)["worker"])))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: running.figure("moeserve_engine_restarts_total") == 1)
        wait_until(lambda: is_ready(running))
        assert ask(running) == (cold, {"device": 0, "host": 0, "disk": 192})
        running.process.kill()
        running.process.wait()
    with service(model, tmp_path / "2", *settings) as running:
        answer = running.http.post(
            "/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 1, "cache_report": True}
        )
        report = answer.json()["usage"]["cache_report"]
        assert (report["matched_tokens"], report["matched_tokens_details"]["disk"]) == (192, 192)
        assert ask(running) == (cold, {"device": 192, "host": 0, "disk": 0})
        wait_until(lambda: running.figure('moeserve_kv_tier_hit_tokens_total{tier="disk"}') == 192)
        wait_until(lambda: running.figure('moeserve_kv_tier_hits_total{tier="device"}') == 1)
        wait_until(lambda: running.figure('moeserve_kv_tier_bytes{tier="device"}') > 0)
        listed = running.http.get("/v1/cache").json()
        assert listed["disk"]["blocks"] >= 13
        assert ask(running, cache_salt="other")[1] == {"device": 0, "host": 0, "disk": 0}
        assert running.http.delete("/v1/cache").status_code == 200
        assert ask(running) == (cold, {"device": 0, "host": 0, "disk": 0})


def test_services_on_loopback_share_kv_in_the_cache_folder_and_restart_warm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOESERVE_KV_DISK_PATH")
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    nothing = {"device": 0, "host": 0, "disk": 0}
    with service(model, tmp_path / "1") as first, service(model, tmp_path / "2") as second:
        cold, where = ask(first)
        assert where == nothing
        other = [one + 1 for one in PROMPT]
        assert ask(second, other)[1] == nothing
        wait_for_blocks(first, 13)
        wait_for_blocks(second, 13)
    assert len(files_of(tmp_path / "cache" / "kv")) >= 26
    with service(model, tmp_path / "3") as again:
        assert ask(again) == (cold, {"device": 0, "host": 0, "disk": 192})


def test_kv_of_a_gguf_file_is_of_its_bytes_and_of_no_path_or_time(tmp_path: Path) -> None:
    path, settings = tmp_path / "model.gguf", ("--kv-disk-path", str(tmp_path / "kv"), "--engine-timeout", "30")

    def answers(name: str, gguf: Path) -> tuple[list[float], int, str]:
        """Return log probabilities, how many tokens came from disk, and the fingerprint."""
        with service(gguf, tmp_path / name, *settings) as running:
            values, where = ask(running)
            body = {"model": "m", "prompt": [3], "max_tokens": 1}
            fingerprint = running.http.post("/v1/completions", json=body).json()["system_fingerprint"]
            wait_for_blocks(running, 13)
            return values, where["disk"], fingerprint

    write_gguf(path)
    first, num_from_disk, fingerprint = answers("0", path)
    assert num_from_disk == 0
    status = path.stat()
    write_gguf(other := tmp_path / "other.gguf", seed=1)
    shutil.copyfile(path, elsewhere := tmp_path / "elsewhere.gguf")
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    second, num_from_disk, its_fingerprint = answers("1", path)
    assert num_from_disk == 0
    assert second != first
    assert its_fingerprint != fingerprint
    assert answers("2", elsewhere) == (first, 192, fingerprint)


def test_the_ranks_of_a_service_share_what_each_has_written(model: Path, tmp_path: Path) -> None:
    settings = ("--kv-disk-path", str(tmp_path / "kv"), "--expert-parallel-size", "2", "--engine-timeout", "30")
    prompts = [[number, *PROMPT, *PROMPT[: 16 * number]] for number in range(3, 9)]
    nothing = {"device": 0, "host": 0, "disk": 0}

    def ask_all(running: Service) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: ask(running, prompt)[0], prompts))

    with service(model, tmp_path / "0", *settings) as running:
        cold = ask_all(running)
        wait_for_blocks(running, sum((len(prompt) + 19) // 16 for prompt in prompts))
        # Prompts differ in length: find one that rank 1 computed. The next life's first request lives on rank 0.
        listed = running.http.get("/v1/cache").json()["prefixes"]
        ends = {entry["prefix_tokens"] for entry in listed if entry["id"].startswith("1.")}
        chosen = next(number for number, prompt in enumerate(prompts) if (len(prompt) + 19) // 16 * 16 in ends)
        expected = cold[chosen], nothing | {"disk": (len(prompts[chosen]) - 1) // 16 * 16}
        engine = next(iter(descendants(children_of(running.process.pid)["worker"])))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: running.figure("moeserve_engine_restarts_total") == 1)
        wait_until(lambda: is_ready(running))
        assert ask(running, prompts[chosen]) == expected
        assert ask_all(running) == cold
    with service(model, tmp_path / "1", *settings) as running:
        assert ask(running, prompts[chosen]) == expected
        assert running.http.get("/v1/cache").json()["prefixes"][0]["id"].startswith("0.")
        assert ask_all(running) == cold
    with service(model, tmp_path / "2", *settings[:2]) as running:
        # One rank sums the experts of a token in another order.
        assert ask(running, prompts[chosen])[1] == nothing


@pytest.mark.parametrize("way", ["pipeline", "tensor"])
def test_of_shared_layers_each_rank_keeps_its_part_and_an_earlier_life_answers(
    model: Path, tmp_path: Path, way: str
) -> None:
    folder, warm = tmp_path / "kv", {"device": 0, "host": 0, "disk": 192}
    settings = ("--kv-disk-path", str(folder), "--engine-timeout", "30", f"--{way}-parallel-size")
    with service(model, tmp_path / "0", *settings, "2") as running:
        cold, where = ask(running)
        assert where == warm | {"disk": 0}
        wait_for_blocks(running, 13)
        for restarts, rank in enumerate((1, 0), 1):
            killed = pid_of(running, f"rank {rank}")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: running.figure("moeserve_engine_restarts_total") == restarts)  # noqa: B023
            wait_until(lambda: is_ready(running))
            assert ask(running) == (cold, warm)
        running.process.kill()
        running.process.wait()
    firsts = files_of(folder)
    assert all(path.with_name(f"{path.name}.1").exists() for path in firsts)
    with service(model, tmp_path / "1", *settings, "2") as running:
        assert ask(running) == (cold, warm)
    # Other layers on a rank are another part; a single rank has other blocks, where whole layers are shared of the same
    # bits.
    with service(model, tmp_path / "2", *settings, "1") as running:
        found, where = ask(running)
        assert where == warm | {"disk": 0}
        assert found == cold or way == "tensor"
    for path in firsts[:3]:
        path.with_name(f"{path.name}.1").unlink(missing_ok=True)
    with service(model, tmp_path / "3", *settings, "2") as running:
        found, where = ask(running)
        assert found == cold
        assert where["disk"] < 192
        wait_until(lambda: running.figure('moeserve_kv_disk_failures_total{kind="gone"}') >= 1)


def beside(folder: Path) -> list[Path]:
    """The files of window blocks and recurrent states."""
    return sorted(path for path in folder.rglob("*") if re.fullmatch(r"[0-9a-f]{32}0[12]", path.name))


# A window of 40 tokens reaches over three blocks. They are written, as states are, at the ends of prompt and request.
@pytest.mark.parametrize(
    ("case", "fields", "num_beside"), [("gpt_oss", {"sliding_window": 40}, 4), ("qwen3_next", {}, 1)]
)
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param((), id="one"),
        pytest.param(("--expert-parallel-size", "2"), id="experts", marks=pytest.mark.long),
        # A stage of gpt_oss has window blocks and no others; one of qwen3_next has states alone.
        pytest.param(("--pipeline-parallel-size", "3"), id="layers"),
        pytest.param(("--tensor-parallel-size", "2"), id="shards", marks=pytest.mark.long),
    ],
)
def test_window_blocks_and_recurrent_states_come_back_from_disk_with_the_same_bits(
    tmp_path: Path, case: str, fields: dict[str, int], num_beside: int, ranks: tuple[str, ...]
) -> None:
    model = write_model_dir(tmp_path / "model", TEMPLATE, SPECIALS)
    saved_model(case, model, vocab_size=256 + len(SPECIALS), **fields)
    folder = tmp_path / "kv"
    settings = ("--kv-disk-path", str(folder), "--engine-timeout", "30", *ranks)
    warm = {"device": 0, "host": 0, "disk": 192}
    with service(model, tmp_path / "0", *settings) as running:
        cold, where = ask(running)
        assert where == {"device": 0, "host": 0, "disk": 0}
        wait_for_blocks(running, 13)
        wait_until(lambda: len(beside(folder)) >= num_beside)
        assert ask(running) == (cold, {"device": 192, "host": 0, "disk": 0})
        engine = next(iter(descendants(children_of(running.process.pid)["worker"])))
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: running.figure("moeserve_engine_restarts_total") == 1)
        wait_until(lambda: is_ready(running))
        assert ask(running) == (cold, warm)
        running.process.kill()
        running.process.wait()
    with service(model, tmp_path / "1", *settings) as running:
        assert ask(running) == (cold, warm)
    for path in beside(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    with service(model, tmp_path / "2", *settings) as running:
        assert ask(running) == (cold, {"device": 0, "host": 0, "disk": 0})
        wait_until(lambda: running.figure('moeserve_kv_disk_failures_total{kind="damaged"}') >= 1)


def test_damaged_files_and_other_settings_are_computed_anew(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    settings = ("--kv-disk-path", str(folder))
    with service(model, tmp_path / "0", *settings) as running:
        cold, _ = ask(running)
        wait_for_blocks(running, 13)
    files = files_of(folder)
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    with service(model, tmp_path / "1", *settings) as running:
        assert ask(running) == (cold, {"device": 0, "host": 0, "disk": 0})
        wait_until(lambda: running.figure('moeserve_kv_disk_failures_total{kind="damaged"}') >= 1)
    with service(model, tmp_path / "2", *settings, "--dtype", "bfloat16") as running:
        assert ask(running)[1] == {"device": 0, "host": 0, "disk": 0}


def test_two_services_share_a_folder_within_its_size(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    settings = ("--kv-disk-path", str(folder), "--kv-disk-size", "40KB")
    with service(model, tmp_path / "0", *settings) as one, service(model, tmp_path / "1", *settings) as two:
        for running in (one, two):
            cold = [ask(running, [*PROMPT[:100], last, last])[0] for last in range(3, 9)]
        assert [ask(one, [*PROMPT[:100], last, last])[0] for last in range(3, 9)] == cold
        wait_until(lambda: one.figure("moeserve_kv_disk_evictions_total") > 0)
        wait_until(lambda: one.figure("moeserve_kv_disk_bytes") <= 40_000)


def test_preempted_requests_come_back_from_disk_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    prompts = [[number, *PROMPT[:40]] for number in range(3, 9)]
    with service(model, tmp_path / "roomy", "--kv-disk-path", str(tmp_path / "other")) as running:
        expected = [ask(running, prompt, max_tokens=100)[0] for prompt in prompts]
    settings = ("--kv-disk-path", str(tmp_path / "kv"), "--kv-overflow", "swap", "--max-model-len", "256")
    with service(model, tmp_path / "tight", *settings, "--kv-cache-memory", KV_OF_24_BLOCKS) as running:

        def is_read_back() -> bool:
            with ThreadPoolExecutor(len(prompts)) as threads:
                answers = list(threads.map(lambda prompt: ask(running, prompt, max_tokens=100)[0], prompts))
            assert answers == expected
            return running.figure('moeserve_kv_disk_copied_bytes_total{direction="read"}') > 0

        # On a slow disk a request gets its place back before its blocks are written, and computes them.
        wait_until(is_read_back)
        wait_until(lambda: running.figure('moeserve_kv_overflow_total{fate="swap"}') > 0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("--expert-parallel-size", "2", "--rebalance-interval", "9"), "--rebalance-interval"),
        (("--kv-host-memory", "1GB"), "--kv-host-memory"),
        (("--no-enable-prefix-caching",), "--no-enable-prefix-caching"),
        (("--kv-disk-path", "/dev/null/kv"), "--kv-disk-path, /dev/null/kv,"),
    ],
)
def test_what_does_not_work_is_refused_in_one_sentence(
    model: Path, tmp_path: Path, settings: tuple[str, ...], sentence: str
) -> None:
    with service(model, tmp_path, "--kv-disk-path", str(tmp_path / "kv"), *settings, ready=False) as running:
        assert running.end() != 0
        assert sentence in running.errors.read_text()


def decline(running: Service, prompt: list[int], threshold: float) -> tuple[str, int, dict[str, int]]:
    """Return how an answer with a threshold ended, its tokens, and where its cached tokens were."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = running.http.post("/v1/completions", json=body | {"cache_hit_threshold": threshold})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found["usage"]
    return found["choices"][0]["finish_reason"], usage["completion_tokens"], usage["cached_tokens_details"]


def test_a_prompt_is_computed_only_if_enough_of_it_is_cached_here_or_written_by_another(
    model: Path, tmp_path: Path
) -> None:
    settings = ("--kv-disk-path", str(tmp_path / "kv"))
    with service(model, tmp_path / "0", *settings) as prefills, service(model, tmp_path / "1", *settings) as decodes:
        nothing = {"device": 0, "host": 0, "disk": 0}
        assert decline(decodes, PROMPT, 0.5) == ("cache_threshold", 0, nothing)
        cold, _ = ask(prefills)
        wait_for_blocks(prefills, 13)
        # The second service was started before the first one had written anything.
        assert decline(decodes, PROMPT, 0.97) == ("cache_threshold", 0, {"device": 0, "host": 0, "disk": 192})
        assert decline(decodes, PROMPT, 0.96) == ("length", 4, {"device": 0, "host": 0, "disk": 192})
        assert ask(decodes) == (cold, {"device": 192, "host": 0, "disk": 0})
        assert decline(prefills, PROMPT, 0.96)[0] == "length"
        refused = decodes.http.post("/v1/completions", json={"model": "m", "prompt": "x", "cache_hit_threshold": 2})
        assert refused.status_code == 400
        streamed = {"model": "m", "messages": [{"role": "user", "content": "x"}], "cache_hit_threshold": 1}
        assert (
            '"finish_reason":"cache_threshold"'
            in decodes.http.post("/v1/chat/completions", json=streamed | {"stream": True}).text
        )
