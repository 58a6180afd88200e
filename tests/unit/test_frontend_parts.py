"""The small parts of the frontend: hang detection, metrics, errors."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from structlog.testing import capture_logs

from moeserve.frontend.errors import context_length_exceeded, invalid, unavailable
from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.route import RouteTable
from moeserve.frontend.routes.service import ExpertRoutes
from moeserve.wire import Stats
from tests.support.refusals import refused


def test_an_error_has_openais_shape() -> None:
    body = json.loads(context_length_exceeded(8, 9, 1).body())
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert unavailable("no", "x", 2.1).headers() == [(b"retry-after", b"3")]


def test_metrics_show_the_engines_newest_counters() -> None:
    metrics = Metrics()
    assert "moeserve_requests_running" not in metrics.render().decode()
    facts = dict.fromkeys(Stats.__struct_fields__, 0) | {"num_running": 2, "prefix_hit_tokens": 96, "blocks_cached": 5}
    metrics.rejections["queue_full"] += 1
    metrics.on_stats(
        Stats(
            **{
                **facts,
                "rejections": {"queue_full": 2, "invalid": 1},
                "queue_seconds": [0.25],
                "features": {},
                "load": None,
            }
        )
    )
    text = metrics.render().decode()
    for line in (
        "moeserve_requests_running 2.0",
        "moeserve_prefix_cache_hits_total 96.0",
        'moeserve_kv_blocks{state="cached"} 5.0',
        'moeserve_rejections_total{reason="queue_full"} 3.0',
        'moeserve_rejections_total{reason="invalid"} 1.0',
        "moeserve_request_queue_seconds_count 1.0",
    ):
        assert line in text.splitlines()


def test_the_log_line_of_a_refused_request_tells_its_code_and_its_field_but_no_text() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        raise invalid("secret", "messages[0].content.secret", "unsupported_parameter")

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        pass

    boundary = RequestBoundary(refuse, Metrics(), RouteTable(()))
    scope = {"type": "http", "path": "/v1/secret", "headers": [], "method": "POST"}
    with capture_logs() as lines:
        asyncio.run(boundary(scope, receive, send))
    (line,) = lines
    assert (line["status"], line["error"], line["field"]) == (400, "unsupported_parameter", "messages")
    assert "secret" not in str(line)


def test_names_that_clients_make_up_do_not_become_labels() -> None:
    metrics = Metrics()
    metrics.count_ignored(["user", "x1", "x2"])
    text = metrics.render().decode()
    assert 'moeserve_ignored_fields_total{field="user"} 1.0' in text
    assert 'moeserve_ignored_fields_total{field="other"} 2.0' in text
    assert "x1" not in text


def test_the_http_process_loads_neither_torch_nor_transformers() -> None:
    code = "import launcher.frontend_main, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31, 2**64, 2**70])
def test_the_length_of_a_trace_is_bounded(max_tokens: int) -> None:
    engine = SimpleNamespace(ready=SimpleNamespace(num_experts=8))
    services: Any = SimpleNamespace(check_serving=lambda: None, engine=engine)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"action": "start", "max_tokens": max_tokens}).encode()}

    state = {"hold": Hold(HeldBytes(), b"")}
    scope = {"type": "http", "method": "POST", "path": "/v1/experts/trace", "headers": [], "state": state}
    with refused("invalid_value", "max_tokens", "2147483647") as caught:
        asyncio.run(ExpertRoutes(services).trace(Request(scope, receive)))
    assert caught.value.status == 400


_COUNTING = """
import sys
from pathlib import Path
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.route import RouteTable

metrics = Metrics(lambda: 2, shared=Path(sys.argv[1]))
metrics.count_response("/v1/completions", 200)
metrics.rejections["queue_full"] += 1
metrics.time_to_first_token.observe(float(sys.argv[2]))
metrics.render()
print(metrics.render().decode() if sys.argv[2] == "30" else "", metrics.measured().ttft.counts[-1])
"""


def _counted(folder: Path, seconds: str) -> str:
    """Have a process count into the folder's files; return what it prints."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-c", _COUNTING, str(folder), seconds]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize("made", [b"", bytes(1 << 16)], ids=["empty", "sized"])
def test_files_that_another_frontend_is_just_making_count_nothing(tmp_path: Path, made: bytes) -> None:
    for kind in ("counter", "histogram"):
        (tmp_path / f"{kind}_1.db").write_bytes(made)
    told = _counted(tmp_path, "30")
    assert "moeserve_time_to_first_token_seconds_count 1.0" in told.splitlines()
    assert float(told.split()[-1]) == 1


def test_several_frontends_count_together_and_one_that_ends_takes_nothing_with_it(tmp_path: Path) -> None:
    for number, seconds in enumerate(("0.2", "30")):
        told = _counted(tmp_path, seconds)
        assert float(told.split()[-1]) == number + 1
    lines = told.splitlines()
    for line in (
        'moeserve_http_responses_total{route="/v1/completions",status="200"} 2.0',
        'moeserve_rejections_total{reason="queue_full"} 2.0',
        "moeserve_log_lines_dropped_total 4.0",
        'moeserve_time_to_first_token_seconds_bucket{le="0.25"} 1.0',
        "moeserve_time_to_first_token_seconds_count 2.0",
        "moeserve_engine_restarts_total 0.0",
    ):
        assert line in lines
    assert sum(line.startswith("# TYPE moeserve_rejections_total") for line in lines) == 1
