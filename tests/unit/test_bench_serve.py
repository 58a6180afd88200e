"""`moeserve bench serve` against a server with scripted answers, over real sockets."""

import asyncio
import json
import socket

import pytest
from click.testing import CliRunner

from launcher.cli import main
from moeserve.bench import runs, workloads
from moeserve.bench.client import Endpoint, ExchangeError, exchange
from moeserve.bench.workloads import WORKLOADS, Shape
from tests.support.openai_server import ScriptedServer, serving


@pytest.fixture
def server():
    with serving(ScriptedServer()) as scripted:
        yield scripted


def bench(*arguments):
    small = ["--system-words", "30", "--prefix-repetitions", "2", "--output-tokens", "4"]
    return CliRunner().invoke(main, ["bench", "serve", *small, *arguments], env={"COLUMNS": "200"})


def bench_json(tmp_path, *arguments):
    file = tmp_path / "report.json"
    result = bench("--json", str(file), *arguments)
    assert result.exit_code == 0, result.output
    return result, json.loads(file.read_text())


def medians(report, workload, variant=""):
    (column,) = [c for c in report["medians"] if (c["workload"], c["variant"]) == (workload, variant)]
    return column["medians"]


def test_all_usual_workloads_are_measured_and_written(server, tmp_path):
    result, report = bench_json(tmp_path, "--url", server.url, "--slo", "ttft:60s,tpot:60s")
    agents = medians(report, "agents")
    assert (agents["requests"], agents["errors"], agents["output_tokens"]) == (24, 0, 96)
    assert agents["cached_tokens"] == 900 * 23
    assert agents["goodput"] == 1
    assert medians(report, "stream")["requests"] == 1
    assert medians(report, "streams")["requests"] == 16
    assert medians(report, "prefix-ttft", "cold")["cached_tokens"] == 0
    assert medians(report, "prefix-ttft", "cached")["cached_tokens"] == 1800
    assert report["servers"][0]["version"] == "1.2.3"
    assert report["servers"][0]["model"] == "scripted"
    assert "TTFT cold / cached" in result.output
    assert "8 agents x 3 turns" in result.output


def test_agents_send_their_whole_history_and_keep_to_the_concurrency(server):
    assert bench("--url", server.url, "--workload", "agents", "--agents", "6", "--agents-at-once", "2").exit_code == 0
    lengths = sorted(len(request["messages"]) for request in server.requests[1:])
    assert lengths == [2] * 6 + [4] * 6 + [6] * 6
    last = next(request for request in server.requests if len(request["messages"]) == 6)
    assert [message["role"] for message in last["messages"]] == [
        "system",
        *("user", "assistant"),
        *("user", "assistant"),
        "user",
    ]
    assert last["messages"][2]["content"] == " w0 w1 w2 w3"
    assert server.most_running <= 2


def test_requests_are_greedy_streams_with_usage_that_ignore_eos(server):
    assert bench("--url", server.url, "--workload", "stream", "--model", "named").exit_code == 0
    request = server.requests[-1]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("named", 0, 4)
    assert request["stream_options"] == {"include_usage": True}
    assert request["ignore_eos"] is True


def test_answers_are_drawn_at_a_temperature_that_is_asked_for(server):
    assert bench("--url", server.url, "--workload", "stream", "--temperature", "0.7").exit_code == 0
    assert {request["temperature"] for request in server.requests[1:]} == {0.7}


def test_honour_eos_leaves_the_field_out(server):
    assert bench("--url", server.url, "--workload", "stream", "--honour-eos").exit_code == 0
    assert all("ignore_eos" not in request for request in server.requests)


def test_a_server_that_refuses_ignore_eos_is_measured_without_it(server, tmp_path):
    server.failure = lambda request: (422, b'{"detail": "unknown: ignore_eos"}') if "ignore_eos" in request else None
    result, report = bench_json(tmp_path, "--url", server.url, "--workload", "stream")
    assert report["servers"][0]["ignore_eos"] is False
    assert medians(report, "stream")["errors"] == 0
    assert "ends at the end-of-sequence token" in result.output


def test_several_tokens_per_event_are_counted_by_usage(server, tmp_path):
    server.tokens_per_event = 3
    _, report = bench_json(tmp_path, "--url", server.url, "--workload", "stream", "--output-tokens", "9")
    assert medians(report, "stream")["output_tokens"] == 9
    assert medians(report, "stream")["tokens_per_event"] == 3


def test_events_are_counted_where_the_server_gives_no_usage(server, tmp_path):
    server.gives_usage = False
    _, report = bench_json(tmp_path, "--url", server.url, "--workload", "stream")
    assert medians(report, "stream")["output_tokens"] == 4
    assert "prompt_tokens" not in medians(report, "stream")


def test_a_response_may_end_with_its_connection(server, tmp_path):
    server.chunked = False
    _, report = bench_json(tmp_path, "--url", server.url, "--workload", "stream")
    assert medians(report, "stream")["errors"] == 0


def test_the_sweep_runs_at_every_concurrency_named(server, tmp_path):
    _, report = bench_json(tmp_path, "--url", server.url, "--workload", "sweep", "--concurrency", "3,1")
    assert [c["variant"] for c in report["medians"]] == ["1 at once", "3 at once"]
    assert medians(report, "sweep", "3 at once")["requests"] == 6


def test_servers_are_measured_in_turn_with_the_same_text_and_compared(server, tmp_path):
    with serving(ScriptedServer()) as other:
        urls = ["--url", f"old={server.url}", "--url", f"new={other.url}"]
        result, report = bench_json(tmp_path, *urls, "--workload", "stream", "--repeat", "3")
    assert [(run["server"], run["run"]) for run in report["runs"]] == [(s, r) for s in ("old", "new") for r in range(3)]
    assert [c["server"] for c in report["medians"]] == ["old", "new"]
    assert report["medians"][0]["advantage"] == {}
    assert report["medians"][1]["advantage"]["tokens_per_s"] > 0
    assert [r["messages"] for r in server.requests] == [r["messages"] for r in other.requests]
    assert "medians of 3 interleaved runs" in result.output


def test_a_rest_follows_each_run_of_a_workload(server, monkeypatch):
    rests, sleep = [], asyncio.sleep

    def note(seconds):
        rests.append(seconds)
        return sleep(0)

    monkeypatch.setattr(runs.asyncio, "sleep", note)
    result = bench("--url", server.url, "--workload", "stream", "--repeat", "2", "--rest", "1.5")
    assert [seconds for seconds in rests if seconds] == [1.5, 1.5]
    assert "medians of 2 interleaved runs, 1.5 s of rest after each," in result.output


def test_a_seed_used_before_is_called_out(server):
    first = bench("--url", server.url, "--workload", "prefix-ttft", "--seed", "5")
    again = bench("--url", server.url, "--workload", "prefix-ttft", "--seed", "5")
    fresh = bench("--url", server.url, "--workload", "prefix-ttft", "--seed", "6")
    assert ["--seed that it has not seen" in result.output for result in (first, again, fresh)] == [False, True, False]


def test_a_refused_turn_ends_its_conversation_and_is_counted_with_what_follows(server, tmp_path):
    overloaded = (503, b'{"error": {"message": "the queue is full"}}')
    server.failure = lambda request: overloaded if len(request["messages"]) == 4 else None
    result, report = bench_json(tmp_path, "--url", server.url, "--workload", "agents")
    assert medians(report, "agents")["errors"] == 16
    assert report["errors"][f"{server.url[7:]}, agents: HTTP 503: the queue is full"] == 8
    assert "the queue is full" in result.output


def test_the_api_key_goes_with_every_request(server):
    assert bench("--url", server.url, "--workload", "stream", "--api-key", "sesame").exit_code == 0
    assert all("Authorization: Bearer sesame" in head for head in server.headers)


@pytest.mark.parametrize("fault", ["broken", "error_event"])
def test_a_server_that_breaks_its_streams_is_reported_in_one_sentence(server, fault):
    setattr(server, fault, True)
    result = bench("--url", server.url)
    assert result.exit_code == 1
    assert result.output.startswith("Error: http://127.0.0.1:")


def test_a_server_that_loads_is_waited_for(server):
    server.unready = 1
    result = bench("--url", server.url, "--workload", "stream")
    assert (result.exit_code, server.unready) == (0, 0)
    assert "is not ready, waiting for at most 300 s: HTTP 503: the model is loading" in result.output


def test_a_server_that_does_not_get_ready_is_reported_in_one_sentence(server):
    server.unready = 10
    result = bench("--url", server.url, "--wait", "0")
    assert (result.exit_code, server.requests) == (1, [])
    assert result.output == f"Error: {server.url}: not ready after 0 s: HTTP 503: the model is loading\n"


def test_a_server_that_is_not_there_is_reported_in_one_sentence():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        result = bench("--url", f"http://127.0.0.1:{unheard.getsockname()[1]}")
    assert result.exit_code == 1
    assert "cannot connect to 127.0.0.1:" in result.output


def test_answering_nothing_in_time_is_an_error():
    async def ask_a_silent_listener():
        async def never(reader, writer):
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(never, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1], False, "")
        async with listener:
            await exchange(endpoint, "GET", "/", b"", {}, 0.05)

    with pytest.raises(ExchangeError, match="no whole answer within"):
        asyncio.run(ask_a_silent_listener())


def test_what_is_not_http_is_an_error():
    async def ask_a_stranger():
        async def greet(reader, writer):
            writer.write(b"220 mail.example ESMTP\r\n")
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(greet, "127.0.0.1", 0)
        endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1], False, "")
        async with listener:
            await exchange(endpoint, "GET", "/", b"", {}, 5)

    with pytest.raises(ExchangeError, match="HTTP"):
        asyncio.run(ask_a_stranger())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft:fast"], "is not like ttft:500ms"),
        (["--concurrency", "1,0"], "is not like 1,4,16"),
        (["--url", "ftp://host"], "is not a URL"),
        (["--url", "http://a:1", "--url", "http://a:1"], "same name"),
        (["--url", "http://a:1", "--model", "m", "--model", "n"], "given 2 times for 1 servers"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, message):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_the_bench_group_lists_its_commands():
    assert "serve" in CliRunner().invoke(main, ["bench", "--help"]).output


BUSY = (503, b'{"error": {"message": "busy"}}', b"Retry-After: 1\r\n")


def goodput(tmp_path, url, *arguments):
    _, report = bench_json(tmp_path, "--url", url, "--goodput", "--seconds", "0.5", "--slo", "ttft:5s", *arguments)
    (curve,) = report["curves"].values()
    return curve


def test_the_curve_of_goodput_has_a_point_for_each_rate(server, tmp_path):
    low, high = goodput(tmp_path, server.url, "--rates", "40,10")
    assert (low["rate"], high["rate"]) == (10, 40)
    assert low["sent"] < high["sent"]
    assert high["answered"] == high["sent"] == round(high["goodput_per_s"] / 2)
    assert high["refused"] == 0
    assert high["recovery_s"] is not None
    assert server.requests[-1]["max_tokens"] == 4


@pytest.mark.slow
def test_answers_that_come_late_are_no_goodput(server, tmp_path):
    (point,) = goodput(tmp_path, server.url, "--rates", "20", "--slo", "ttft:5s,e2e:5s")
    assert point["goodput_per_s"] > 0
    server.failure = lambda request: BUSY if len(server.requests) % 2 else None
    (point,) = goodput(tmp_path, server.url, "--rates", "20")
    assert 0 < point["refused"] == point["sent"] - point["answered"]
    assert point["told_s"] == 1.0
    assert point["tries"] == 1.0


@pytest.mark.slow
def test_clients_that_retry_come_back_when_they_are_told_to(server, tmp_path):
    server.failure = lambda request: BUSY if 1 < len(server.requests) < 5 else None
    (point,) = goodput(tmp_path, server.url, "--rates", "20", "--retry")
    assert point["answered"] == point["sent"]
    assert point["tries"] > 1.0


def test_clients_that_are_impatient_hang_up(server, tmp_path):
    # The first one warms up, and those behind the crowd look whether the server is itself again.
    server.stalls = lambda number: number in (3, 5, 7)
    (point,) = goodput(tmp_path, server.url, "--rates", "40", "--impatient", "1")
    assert 0 < point["answered"] < point["sent"]
    assert point["refused"] == 0


@pytest.mark.slow
def test_the_best_rate_is_found_where_none_is_given(server, tmp_path):
    curve = goodput(tmp_path, server.url, "--output-tokens", "400")
    assert [round(point["rate"] / curve[0]["rate"]) for point in curve] == [1, 2, 4, 8, 10]


@pytest.mark.parametrize("rates", ["0", "x", "-1", "nan", "inf"])
def test_rates_that_are_none_are_refused(rates):
    result = bench("--goodput", "--rates", rates)
    assert result.exit_code == 2
    assert "is not like" in result.output


def test_traces_are_sessions_that_grow_by_tool_results_to_the_length_of_real_ones():
    (workload,) = WORKLOADS["traces"](Shape(num_agents=3), 0, 0)
    assert {len(one.questions) for one in workload.conversations} == {43}
    assert (workload.max_tokens, {one.gap_s < 1 for one in workload.conversations}) == (444, {True})
    for one in workload.conversations:
        lengths = [len(question.split()) for question in one.questions]
        middle = len(one.system.split()) + sum(lengths[:22]) + 21 * 400
        assert 90_000 < middle < 190_000  # words: 900 are some 1,000 tokens
        assert max(lengths) > 4 * sorted(lengths)[21]
    (small,) = WORKLOADS["traces"](Shape(num_agents=1, num_turns=5, scale=0.01), 0, 0)
    assert (small.max_tokens, len(small.conversations[0].questions)) == (4, 5)
    assert len(small.conversations[0].system.split()) == 190


def test_traces_run_with_a_pause_between_turns(server, monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def noted(seconds, *rest):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(workloads.asyncio, "sleep", noted)
    result = bench("--url", server.url, "--workload", "traces", "--agents", "2", "--turns", "3", "--scale", "0.001")
    assert result.exit_code == 0, result.output
    assert pauses.count(0.5) >= 4
