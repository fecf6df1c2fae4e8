"""Time of a run before it starts: counted operations, speeds of GPUs, and epochs over processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hf_bucketing import BucketingError, Size
from hf_bucketing.buckets.cost import CostFit
from hf_bucketing.placement import MemoryConfig
from hf_bucketing.planner import PlanConfig
from hf_bucketing.planner.components import Components, read_components
from hf_bucketing.planner.encoding import encode_media
from hf_bucketing.planner.gpus import TimeConfig
from hf_bucketing.planner.memory import StepShape, plan_components
from hf_bucketing.planner.time import (
    BatchCost,
    Speed,
    StepSeconds,
    encoding_flops,
    epoch_time,
    training_flops,
)
from hf_bucketing.plans import EpochPlan
from hf_bucketing.settings import changed

CONFIG = PlanConfig.from_flat(
    device="cpu", mixed_precision="no", cached="all", max_sequence_length=16, train_batch_size=1
)
CHECKPOINTS = MemoryConfig(gradient_checkpointing=True)
CHECKPOINTED_LORA = changed(CONFIG, lora_rank=4, gradient_checkpointing=True)
TinyFolder = Callable[[str], Path]


def components_of(tiny_folder: TinyFolder, name: str) -> Components:
    return read_components(str(tiny_folder(name)))


def flops_of(components: Components, config: PlanConfig, *sizes: Size) -> float:
    text = components.recipe.text_tokens(config.run.max_sequence_length) * len(sizes)
    tokens = sum(map(components.spec.num_tokens, sizes))
    return plan_components(components, config, StepShape.of(sizes, tokens=tokens, text_tokens=text)).flops.hardware


@pytest.mark.cases(slow=("qwen-image-lora",))
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("wan", CONFIG, id="wan-all", marks=pytest.mark.slow),
        pytest.param("qwen-image", CHECKPOINTED_LORA, id="qwen-image-lora"),
        pytest.param("ltx", CHECKPOINTED_LORA, id="ltx-lora", marks=pytest.mark.every),
        pytest.param("hunyuan-video", CONFIG, id="hunyuan-video-all", marks=pytest.mark.every),
        pytest.param("flux", CHECKPOINTED_LORA, id="flux-lora", marks=pytest.mark.every),
    ],
)
def test_three_traced_sizes_say_the_operations_of_all_others(name: str, config: PlanConfig, tiny_folder) -> None:
    components = components_of(tiny_folder, name)
    frames = 1 if components.recipe.family.images_only else 9
    sizes = [components.spec.snap(Size(*size)) for size in ((1, 32, 96), (1, 64, 64), (frames, 96, 128))]
    flops = training_flops(components, config, sizes).total
    other = components.spec.snap(Size(frames, 64, 160))
    length = components.spec.num_tokens(other) + components.recipe.text_tokens(config.run.max_sequence_length)
    (predicted,) = flops.of_samples([length])
    assert predicted == pytest.approx(flops_of(components, config, other), rel=1e-9)
    assert flops_of(components, config, other, other) == pytest.approx(2 * predicted, rel=1e-9)


@pytest.mark.slow
def test_attention_is_counted_by_its_formula_with_and_without_recomputation(tiny_folder) -> None:
    components = components_of(tiny_folder, "wan")
    config = components.transformer.config
    width, blocks = config["num_attention_heads"] * config["attention_head_dim"], config["num_layers"]
    sizes = [Size(1, 32, 96), Size(1, 64, 64), Size(9, 96, 128)]
    checkpointed = changed(CONFIG, gradient_checkpointing=True)
    forward, backward = 2 * 2 * width, 5 * 2 * width  # products of scores, two forward and five backward
    assert training_flops(components, CONFIG, sizes).total.quadratic == pytest.approx(blocks * (forward + backward))
    again = training_flops(components, checkpointed, sizes).total.quadratic
    assert again == pytest.approx(blocks * (2 * forward + backward))


def test_processes_that_share_samples_take_a_share_of_the_operations(tiny_folder) -> None:
    components, sizes = components_of(tiny_folder, "wan"), [Size(1, 64, 64), Size(9, 64, 64)]
    shared = changed(CONFIG, num_processes=2, context_parallel_degree=2)
    alone = training_flops(components, CONFIG, sizes).total
    assert training_flops(components, shared, sizes).total == alone.times(0.5)
    assert alone.quadratic == 0, "two sizes give a line"
    assert training_flops(components, CONFIG, sizes[:1]).total.linear == 0, "one size gives itself"


def test_encoding_counts_texts_once_and_media_by_their_tokens_in_float32(tiny_folder) -> None:
    components = components_of(tiny_folder, "wan")
    small, large = (encoding_flops(components, CONFIG, Size(9, side, side)) for side in (32, 64))
    assert small.per_sample == large.per_sample > 0
    assert small.linear == pytest.approx(large.linear, rel=0.25), "but for attention within frames"
    longer = encoding_flops(components, changed(CONFIG, max_sequence_length=32), Size(9, 32, 32))
    assert longer.per_sample > 1.9 * small.per_sample
    counted = encode_media(components, CONFIG, size=Size(9, 32, 32), samples=1).flops
    assert small.linear * components.spec.num_tokens(Size(9, 32, 32)) == pytest.approx(2 * counted)


def test_an_epoch_lasts_as_long_as_the_slowest_process_of_each_step() -> None:
    plan = EpochPlan(
        indices=np.arange(6),
        offsets=np.array([0, 1, 3, 4, 6]),
        bucket_ids=np.zeros(4, np.int32),
        num_processes=2,
    )
    cost = BatchCost(per_batch=1.0, per_sample=0.5, linear=0.25, quadratic=0.0625)
    lengths = np.array([4, 2, 2, 8, 4, 4])
    assert cost.of_batches(lengths, plan.offsets).tolist() == [3.5, 3.5, 7.5, 6.0]
    seconds = StepSeconds(cost, 0.5, 2.0, "")
    whole = epoch_time(plan, lengths, seconds)
    assert (whole.steps, whole.seconds, whole.least, whole.most) == (2, 11.0, 5.5, 22.0)
    assert (whole.p5, whole.median, whole.p95) == pytest.approx((3.7, 5.5, 7.3))
    half = epoch_time(plan, lengths, seconds, rows_of_plan=0.5)
    assert (half.steps, half.seconds, half.median) == (4, 22.0, whole.median)
    assert half.price(1800.0, num_gpus=2) == 22.0


def test_time_is_a_range_of_the_peak_of_the_gpu_or_what_a_run_measured() -> None:
    guessed = Speed.of(TimeConfig(), gpu_memory=24)
    assert "rtx-4090, a guess from 24 GiB" in guessed.source
    named = Speed.of(TimeConfig(gpu="a100", utilisation=[0.2, 0.4]), gpu_memory=24)
    assert (named.slowest, named.fastest) == pytest.approx((0.2 * 312e12, 0.4 * 312e12))
    seconds = named.seconds(BatchCost(linear=1e12))
    assert seconds.cost.linear * seconds.least == pytest.approx(1 / (0.4 * 312))
    assert seconds.cost.linear * seconds.most == pytest.approx(1 / (0.2 * 312))
    assert Speed.of(TimeConfig(peak_tflops=10.0), gpu_memory=24).fastest < 10e12
    fit = CostFit(linear=2.0, quadratic=3.0, per_batch=1.0, residual=0.1, num_steps=30)
    measured = StepSeconds.measured(fit)
    assert measured.cost.of_batches(np.array([2]), np.array([0, 1])).tolist() == [1 + 4 + 12]
    assert (measured.least, measured.most) == pytest.approx((0.9, 1.1))


@pytest.mark.parametrize(
    ("blocks", "tflop", "seconds"),
    [
        pytest.param(30, 119.2, [1.029], id="1.3B-lora-three-images-of-3600"),
        pytest.param(30, 484.0, [1.638, 2.022], id="1.3B-lora-32760"),
        pytest.param(30, 566.5, [1.872, 2.264], id="1.3B-all-weights-32760"),
        pytest.param(8, 1765.4, [3.950, 4.017], id="14B-width-37440"),
        pytest.param(8, 995.5, [2.579, 2.682], id="14B-width-four-of-9360"),
    ],
)
def test_measured_steps_of_an_h100_lie_within_their_range(blocks: int, tflop: float, seconds: list[float]) -> None:
    """One H100, checkpointing, one size and packed: the operations are those of tests/planner/test_flops.py."""
    speed = Speed.of(TimeConfig(gpu="h100"), gpu_memory=80).of_step(1e12 * tflop, blocks=blocks)
    step = speed.seconds(BatchCost(per_batch=1e12 * tflop))
    least, most = (factor * step.cost.per_batch for factor in (step.least, step.most))
    assert most / least < 3
    for measured in seconds:
        assert 0.97 * least <= measured <= 1.03 * most


def test_a_utilisation_that_is_given_holds_for_steps_of_any_size() -> None:
    speed = Speed.of(TimeConfig(gpu="h100", utilisation=[0.2, 0.4]), gpu_memory=80)
    assert speed.of_step(1e12, blocks=30) == speed.of_step(1e16, blocks=30) == speed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "rtx-1"}, "`gpu` must be one of rtx-4080"),
        ({"gpu": "h100", "peak_tflops": 3.0}, "give one of them"),
        ({"peak_tflops": 0.0}, "`peak_tflops` must be above 0"),
        ({"peak_tflops": math.nan}, "`peak_tflops` must be above 0"),
        ({"utilisation": [0.5, 0.2]}, "two shares of the peak"),
        ({"utilisation": [0.5]}, "two shares of the peak"),
        ({"price_per_hour": -1.0}, "`price_per_hour` must be at least 0"),
    ],
)
def test_impossible_speeds_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(BucketingError, match=message):
        TimeConfig(**settings)
