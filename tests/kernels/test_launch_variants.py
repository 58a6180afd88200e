"""Serving compiles nothing: what steps of all kinds launch was launched at start-up."""

from importlib.util import find_spec

import pytest

from kernels.gpu.moe_config import MoeConfigs, MoeShape
from moeserve.model.gpu.setup import LaunchVariants, StepLimits, measure_steps
from moeserve.model.step_arrays import ExtendLimits, StepShape
from tests.support.separate_process import output_of

HOPPER_SHARED_BYTES = 227 << 10
# Between them windows, sinks, latent attention, flat norms, layer norms, shared experts and models without experts.
CASES = ("llama", "qwen2_moe", "gpt_oss", "deepseek_v3-yarn", "mixtral:int4:fp8_e4m3", "deepseek_v3-yarn:fp8:fp8_e4m3")
CASES += ("qwen3_moe:awq:auto",)
CASES_OF_RANKS = ("mixtral", "mixtral:int4:fp8_e4m3")
MORE_CASES_OF_RANKS = ("deepseek_v3-yarn:fp8:fp8_e4m3", "qwen3_moe:int8:auto")
MORE_CASES = (
    "mixtral:int8:auto",
    "gpt_oss:fp8:fp8_e4m3",
    "olmoe",
    "phimoe",
    "mixtral",
    "qwen3_moe",
    "granitemoe",
    "mistral-window",
    "qwen3_next",
)


def variants(limits, experts=True, sparse_layers=(True, True)):
    configs = MoeConfigs(MoeShape(64, 768, 2048, 8, "bfloat16"), HOPPER_SHARED_BYTES)
    extends = ExtendLimits(32, 8, 30)
    choice = configs.variant if experts else None
    return LaunchVariants(limits, lambda length: length <= 64, choice, extends, sparse_layers), configs


def test_few_steps_launch_all_variants_of_every_number_of_tokens():
    limits = StepLimits(4096, 64, 8192)
    of, configs = variants(limits)
    steps = of.steps()
    assert len(steps) < 16
    assert steps[0] == StepShape(0, (4096,), 1)
    assert frozenset().union(*(of.of_step(step) for step in steps)) == of.all()
    for num_decodes in (0, 1, 3, 64):
        for length in (0, 1, 17, 64, 65, 511, 512, 513, 1024, 4032):
            prompts = (length,) if length else ()
            if num_decodes + length:
                assert of.of_step(StepShape(num_decodes, prompts, num_decodes + len(prompts))) <= of.all()
    # Both ways of sorting rows under one configuration.
    assert configs(512) == configs(513)
    assert {("experts", configs.variant(512)), ("experts", configs.variant(513))} <= of.all()


@pytest.mark.parametrize(("sparse_layers", "rows"), [((True, False), 4096), ((False, True), 1), ((True, True), None)])
def test_experts_meet_all_rows_in_inner_layers_and_the_wanted_ones_in_the_last(sparse_layers, rows):
    of, configs = variants(StepLimits(4096, 64, 8192), sparse_layers=sparse_layers)
    met = {found for found in of.of_step(StepShape(0, (4096,), 1)) if found[0] == "experts"}
    assert met == {("experts", configs.variant(number)) for number in ((rows,) if rows else (4096, 1))}
    assert all(("experts", configs.variant(number)) in of.all() for number in (1, 17, 63, 600, 4096))
    assert frozenset().union(*(of.of_step(step) for step in of.steps())) == of.all()


def test_a_model_without_experts_has_a_decode_and_three_prompts_to_launch():
    of, _ = variants(StepLimits(4096, 24, 8192), experts=False)
    shapes = [StepShape(0, (4096,), 1), StepShape(0, (64,), 1), StepShape(0, (32,), 1), StepShape(1, (), 1)]
    assert of.steps() == shapes


def test_prompts_of_one_token_beyond_what_is_packed_are_known_to_be_prefilled():
    of, _ = variants(StepLimits(32, 32, 8192), experts=False)
    assert of.of_step(StepShape(0, (1,) * 31, 31)) == {"extend", ("prefill", True)} <= of.all()
    assert of.steps() == [StepShape(0, (1,) * 32, 32), StepShape(1, (), 1)]


def test_three_sizes_of_steps_are_launched_once_before_they_are_timed():
    launched = []

    def clock(launch):
        launch()
        return float(launched[-1].num_tokens)

    assert measure_steps(launched.append, 4096, clock) == [(256, 256.0), (1024, 1024.0), (4096, 4096.0)]
    assert [shape.prompt_lens for shape in launched] == [(size,) for size in (256, 256, 1024, 1024, 4096, 4096)]
    assert [size for size, _ in measure_steps(launched.append, 8, clock)] == [1, 2, 8]


def test_extends_and_prefills_of_one_step_are_both_known():
    of, _ = variants(StepLimits(4096, 64, 8192), experts=False)
    assert of.of_step(StepShape(3, (4, 500, 4), 6)) == {"decode", "extend", ("prefill", False)}
    assert of.of_step(StepShape(3, (4, 500, 4), 6)) <= of.all()


def test_steps_keep_within_the_limits():
    of, _ = variants(StepLimits(300, 2, 100))
    assert max(step.num_tokens for step in of.steps()) <= 200
    assert all(len(step.prompt_lens) <= 2 and max(step.prompt_lens, default=1) <= 100 for step in of.steps())


@pytest.mark.parametrize(
    "cases",
    [pytest.param(CASES, marks=pytest.mark.kernel_change), pytest.param(MORE_CASES, marks=pytest.mark.long)],
    ids=["few", "more"],
)
def test_no_step_reaches_a_kernel_that_start_up_has_not(cases):
    lines = output_of("tests.support.launch_keys", *cases)
    assert [line for line in lines if line.startswith("NEW")] == []
    dense = {"llama", "mistral-window"}
    ways = [f"{case} {way}" for case in cases for way in ("graphs", "eager", "slots")[: 2 if case in dense else 3]]
    assert [line.rsplit(":", 1)[0] for line in lines] == ways
    assert all(int(line.split()[-3]) >= 15 for line in lines)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="ranks meet through deepspeed")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES_OF_RANKS, marks=pytest.mark.kernel_change),
        pytest.param(MORE_CASES_OF_RANKS, marks=pytest.mark.long),
    ],
    ids=["few", "more"],
)
def test_no_step_of_several_ranks_reaches_a_kernel_that_start_up_has_not(cases):
    lines = output_of("tests.support.rank_launch_keys", *cases)
    assert [line for line in lines if line.startswith("NEW")] == []
    counted = [line for line in lines if line.endswith("at start")]
    ways = [f"{case} {way}" for case in cases for way in ("graphs", "alltoall", "slots")]
    assert [line.rsplit(":", 1)[0] for line in counted] == ways
    assert all(int(line.split()[-3]) >= 30 for line in counted)
