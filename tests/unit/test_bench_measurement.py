"""The parts of `moeserve bench serve` without sockets: workloads, streams, statistics, objectives, comparisons."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.bench.client import Endpoint, StreamError, error_message, read_answer, timed_data
from moeserve.bench.metrics import RequestRecord, RunMetrics, Slo, columns, covered, percentile, summarise
from moeserve.bench.runs import was_warm
from moeserve.bench.workloads import WORKLOADS, Shape, seeded_text


def record(sent_at=0.0, events=(1.0, 1.1, 1.2), output_tokens=3, **others):
    ended_at = events[-1] if events else sent_at
    return RequestRecord("", False, sent_at, ended_at, tuple(events), output_tokens=output_tokens, **others)


def event(**chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def content(words, finish_reason=None):
    return event(choices=[{"delta": {"content": words}, "finish_reason": finish_reason}])


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_for_the_same_seed_and_run(name):
    assert WORKLOADS[name](Shape(), 7, 0) == WORKLOADS[name](Shape(), 7, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_prompt_of_another_seed_or_run_begins_alike(name):
    def beginnings(seed, run):
        conversations = [c for w in WORKLOADS[name](Shape(), seed, run) for c in w.conversations]
        return {" ".join((c.system or c.questions[0]).split()[:4]) for c in conversations}

    assert not beginnings(7, 0) & beginnings(7, 1)
    assert not beginnings(7, 0) & beginnings(8, 0)


def test_a_server_was_warm_if_it_had_every_cold_prompt_cached():
    def asked(cold, cached):
        return RequestRecord("", cold, 0.0, 1.0, prompt_tokens=100, cached_tokens=cached)

    agents_at_once = [asked(True, 90), asked(True, 2), asked(True, 90), asked(False, 95)]
    assert not was_warm(agents_at_once)
    assert was_warm([asked(True, 90), asked(True, 88), asked(False, 0)])
    assert not was_warm([asked(False, 90)])


def test_agents_share_their_system_prompt_and_nothing_else():
    (workload,) = WORKLOADS["agents"](Shape(), 0, 0)
    questions = [question for c in workload.conversations for question in c.questions]
    assert len({c.system for c in workload.conversations}) == 1
    assert len(set(questions)) == len(questions) == 24
    assert workload.concurrency == 4


def test_a_cached_request_has_the_prefix_of_the_cold_one_before_it_and_another_question():
    (workload,) = WORKLOADS["prefix-ttft"](Shape(prefix_repetitions=2), 0, 0)
    cold, cached, *_ = workload.conversations
    assert (cold.variant, cached.variant) == ("cold", "cached")
    assert cold.system == cached.system
    assert cold.questions != cached.questions
    assert len({c.system for c in workload.conversations}) == 2


def test_output_tokens_of_every_workload_can_be_set():
    for make in WORKLOADS.values():
        assert {w.max_tokens for w in make(Shape(output_tokens=5), 0, 0)} == {5}


@given(st.integers(1, 200), st.integers())
def test_text_has_the_words_asked_for(num_words, seed):
    assert len(seeded_text(num_words, seed).split()) == num_words


def test_an_event_has_the_time_of_the_read_that_completed_it():
    reads = [(1.0, b"data: a\n"), (2.0, b"\ndata: b\n\ndata"), (3.0, b": c\r\n\r\n: comment\n\n")]
    assert list(timed_data(reads)) == [(2.0, b"a"), (2.0, b"b"), (3.0, b"c")]


@given(st.lists(st.integers(1, 40)))
def test_an_answer_does_not_depend_on_where_the_reads_are_cut(cuts):
    stream = content("one") + content(" two", "stop") + event(choices=[], usage={"completion_tokens": 2})
    reads, position = [], 0
    for length in cuts:
        reads.append((0.0, stream[position : position + length]))
        position += length
    answer = read_answer([*reads, (0.0, stream[position:])])
    assert (answer.text, answer.output_tokens, len(answer.event_times)) == ("one two", 2, 2)


def test_tokens_are_counted_by_usage_not_by_events():
    usage = {"prompt_tokens": 30, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}
    answer = read_answer([(1.0, content("")), (2.0, content("a b c d e f g", "length")), (3.0, event(usage=usage))])
    assert answer.event_times == (2.0,)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (30, 7, 16)


def test_reasoning_text_is_a_token_too():
    thought = event(choices=[{"delta": {"reasoning_content": "hm"}}])
    answer = read_answer([(1.0, thought), (2.0, content("yes", "stop"))])
    assert (answer.text, answer.event_times) == ("yes", (1.0, 2.0))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (content("cut"), "without a finish reason"),
        (content("a") + event(error={"message": "the engine died"}), "the engine died"),
        (b"data: {broken\n\n", "not a chat completion chunk"),
        (b'data: {"choices": 3}\n\n', "not a chat completion chunk"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(stream, message):
    with pytest.raises(StreamError, match=message):
        read_answer([(0.0, stream)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "unknown field"}', "unknown field"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_an_error_body_of_any_form_gives_a_message(body, message):
    assert error_message(body) == message


def test_times_of_a_request_count_from_when_it_was_sent():
    measured = record(sent_at=0.5, events=(1.0, 1.2, 1.8), output_tokens=5)
    assert measured.ttft == pytest.approx(0.5)
    assert measured.tpot == pytest.approx(0.8 / 4)
    assert measured.gaps == pytest.approx([0.2, 0.6])


def test_percentiles_are_interpolated():
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([10.0], 99) == 10.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 100))
def test_a_percentile_lies_between_the_extremes(values, percent):
    assert min(values) - 1e-6 <= percentile(values, percent) <= max(values) + 1e-6


def test_overlapping_times_count_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4


def test_rates_are_over_the_time_in_which_requests_were_under_way():
    records = [record(0.0, (1.0, 2.0), 10), record(1.0, (2.0, 4.0), 10), record(10.0, (11.0,), 5)]
    metrics = summarise(records, None)
    assert metrics["busy_s"] == 5.0
    assert metrics["tokens_per_s"] == 25 / 5
    assert metrics["requests_per_s"] == 3 / 5
    assert metrics["tokens_per_event"] == 25 / 5


def test_failed_requests_count_as_errors_and_against_goodput_only():
    records = [record(), record(events=(), output_tokens=0, error="refused")]
    metrics = summarise(records, Slo(ttft=2.0).met)
    assert (metrics["requests"], metrics["errors"], metrics["goodput"]) == (2, 1, 0.5)
    assert metrics["ttft_p99"] == 1.0


def test_what_no_server_told_is_absent_rather_than_zero():
    metrics = summarise([record()], None)
    assert "cached_tokens" not in metrics
    assert "goodput" not in metrics


def test_objectives_are_read_with_their_units():
    assert Slo.parse("ttft:500ms, tpot:.1s") == Slo(ttft=0.5, tpot=0.1)


@pytest.mark.parametrize("wrong", ["", "ttft", "ttft:500", "itl:5ms", "ttft:-1s", "ttft:1s,ttft:2s", "ttft:1..5s"])
def test_objectives_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=r"is not like|twice"):
        Slo.parse(wrong)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft=1.0), True),
        (Slo(ttft=0.99), False),
        (Slo(ttft=1.0, tpot=0.05), False),
        (Slo(e2e=1.2), True),
        (Slo(), True),
    ],
)
def test_a_request_meets_its_objectives_only_if_it_meets_all(slo, met):
    assert slo.met(record()) is met


def test_medians_over_runs_and_ratios_within_runs():
    def run(server, number, ttft, rate):
        return RunMetrics("stream", "", server, number, {"ttft_p50": ttft, "tokens_per_s": rate})

    measured = [run("a", 0, 1.0, 10), run("a", 1, 2.0, 5), run("a", 2, 3.0, 4)]
    measured += [run("b", 0, 0.5, 20), run("b", 1, 1.0, 10), run("b", 2, 3.0, 4)]
    first, second = columns(measured)
    assert first.medians == {"ttft_p50": 2.0, "tokens_per_s": 5}
    assert first.advantage == {}
    assert second.medians == {"ttft_p50": 1.0, "tokens_per_s": 10}
    assert second.advantage == {"ttft_p50": 2.0, "tokens_per_s": 2.0}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Endpoint("127.0.0.1", 8000, False, "")),
        ("http://127.0.0.1:8000/v1/", Endpoint("127.0.0.1", 8000, False, "")),
        ("https://host.example/base/v1", Endpoint("host.example", 443, True, "/base")),
        ("localhost:80", Endpoint("localhost", 80, False, "")),
    ],
)
def test_urls_are_taken_with_and_without_v1(url, expected):
    assert Endpoint.parse(url) == expected


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:notaport"])
def test_what_is_not_a_url_is_refused(url):
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Endpoint.parse(url)
