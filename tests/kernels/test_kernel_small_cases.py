"""Cases of small kernels: they compute the same as their peers, and their checks find errors."""

import re

import pytest
import torch

from benchmarks.kernels.fused import fused_cases
from benchmarks.kernels.measure import TOLERANCE, WrongResultError, cold_sets, run_guarded
from benchmarks.kernels.small import gate_cases, norm_cases, sampling_cases

pytestmark = pytest.mark.kernel_change

SIZES = {"_WIDTH": 64, "_HEADS": 4, "_KV_HEADS": 2, "_DIM": 32, "_EXPERTS": 16}


def all_cases(device):
    small = [make for cases in (norm_cases, gate_cases, sampling_cases) for make in cases(device)]
    return small + fused_cases(device, 4)


# The smallest of each kind; larger ones take minutes in the interpreter.
SMALLEST = {
    number: case.name
    for number, case in enumerate(all_cases(torch.device("cpu")))
    if re.search(r"norm, 64 |, 64 tokens|, 1 tokens|, 1 x|gate, 64", case.name)
}


@pytest.mark.parametrize("number", SMALLEST, ids=SMALLEST.values())
def test_small_cases_compute_what_their_peers_do(number, device, monkeypatch):
    for size, small in SIZES.items():
        monkeypatch.setattr(f"benchmarks.kernels.small.{size}", small)
        monkeypatch.setattr(f"benchmarks.kernels.fused.{size}", small, raising=False)
    monkeypatch.setattr("benchmarks.kernels.small._VOCAB", 500)
    monkeypatch.setattr("benchmarks.kernels.measure.COLD_BYTES", 1)
    case = all_cases(device)[number].make()
    if case.relative_error is not None:
        assert case.relative_error() < TOLERANCE
    ours = all_cases(device)[number].make().calls[0]().clone()
    assert ours.numel()
    for peer in case.peers:
        # Made anew, since some work in place.
        calls = all_cases(device)[number].make().peers[peer]
        assert len(calls) == len(case.calls)
        theirs = calls[0]()
        assert theirs.numel() == ours.numel()
        if "top-" not in SMALLEST[number] and "temperature" not in SMALLEST[number]:  # Draws.
            torch.testing.assert_close(theirs.reshape(ours.shape), ours, rtol=2e-2, atol=2e-2)


def test_no_set_is_in_the_cache_when_it_is_read_again():
    assert [cold_sets(size) for size in (2**40, 2**29, 2**29 - 1, 2**24, 1)] == [1, 1, 2, 32, 256]
    assert cold_sets(2**24, at_most=8) == 8


def test_what_is_written_beside_an_output_or_differs_from_run_to_run_is_found():
    like, numbers = torch.zeros(3, 4), iter(range(9))
    assert run_guarded(lambda out: out.copy_(torch.ones(3, 4)), like).sum() == 12
    assert run_guarded(lambda out: out[:2].zero_(), like)[2].isnan().all()
    with pytest.raises(WrongResultError, match="beside"):
        run_guarded(lambda out: out.as_strided((4, 4), (4, 1), out.storage_offset()).zero_(), like)
    with pytest.raises(WrongResultError, match="differ"):
        run_guarded(lambda out: out.fill_(next(numbers)), like)
