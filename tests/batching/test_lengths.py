"""Batches of like length: padded as planned, each sample with the loss that it has alone, resumed and recounted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError, CostModel
from hf_bucketing.batching import LengthStep, way_of
from hf_bucketing.batching.rows import TrainingData, make_data, make_held_out_data
from hf_bucketing.batching.sample_rows import ModelTokens, SampleRows
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.conditions.rows import ConditionRules
from hf_bucketing.configuration import BatchConfig
from hf_bucketing.errors import OversizeError
from hf_bucketing.loaders.random_resize import RandomResize
from hf_bucketing.models import enable_packing
from hf_bucketing.packing.pack import Packing
from hf_bucketing.plans import EpochConfig
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.recount import recount
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.training.loop import Trainer
from tests.caching.test_caching import load_recipe
from tests.conftest import as_flags
from tests.training.test_oversize import SPEC, UNLIMITED, prepared
from tests.training.training_cases import STABLE, TINY_WAN, count_samples, in_process, run, train

LENGTH: dict[str, Any] = {"batching": "length", "max_tokens": 640}
SIZES = [(5, 32, 64), (1, 64, 32), (9, 32, 32)]


def batch_of(rows: list[int]) -> dict[str, Any]:
    """Return a batch of some of three samples of different sizes."""
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.rand(3, *size, generator=generator) * 2 - 1 for size in SIZES]
    captions = ["a red square", "blue", ""]
    return {
        "pixel_values": [pixels[row] for row in rows],
        "caption": [captions[row] for row in rows],
        "index": [4 + row for row in rows],
        "fps": [8.0] * len(rows),
    }


def step_of(folder: Path) -> LengthStep:
    recipe = load_recipe(folder)
    for name in ("transformer", "text_encoder", "vae"):
        getattr(recipe.pipeline, name).double()
    objective = recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0)
    return LengthStep(recipe=recipe, objective=objective, packing=enable_packing(recipe.transformer))


def losses_and_gradient(step: LengthStep, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    transformer = step.recipe.transformer
    losses = step(transformer, batch_of(rows), epoch=0).values
    weights = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), weights, materialize_grads=True, allow_unused=True)
    return losses.detach(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("longest", [None, 7])
@pytest.mark.parametrize("family", ["wan", "ltx"])
def test_each_sample_has_the_loss_and_the_gradients_that_it_has_alone(
    family: str, longest: int | None, pipeline_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(pipeline_dirs[family])
    if longest is not None:  # such as the columns of Wan's rotary tables, which are more
        monkeypatch.setattr(type(step.recipe.family), "longest_strip", lambda self, transformer: longest)
    alone = [losses_and_gradient(step, [row]) for row in range(3)]
    losses, gradient = losses_and_gradient(step, [0, 1, 2])
    assert torch.allclose(losses, torch.cat([loss for loss, _ in alone]), rtol=1e-6, atol=1e-6)
    expected = torch.stack([gradient for _, gradient in alone]).sum(0)
    assert float((gradient - expected).norm() / expected.norm()) <= 1e-6


def strips_of(packing: Packing, tokens: list[int]) -> tuple[int, tuple[int, ...]]:
    """Return the length of the strips of a padded pack of images of one row each, and the strips of each sample."""
    latents = [torch.zeros(packing.family.in_channels(packing.transformer), 1, 2, 2 * count) for count in tokens]
    text = [torch.zeros(3, packing.family.text_dim(packing.transformer))] * len(tokens)
    layout = packing.pack(latents, timesteps=torch.zeros(len(tokens)), text=text, padded=True).layout
    return layout.strip_length, layout.strips_per_sample


def test_rows_are_as_long_as_the_longest_sample_or_as_positions_allow(
    pipeline_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = step_of(pipeline_dirs["wan"]).packing
    monkeypatch.setattr(type(packing.family), "check_layout", lambda *args, **options: None)
    assert strips_of(packing, [3, 12, 7]) == (12, (1, 1, 1))
    monkeypatch.setattr(type(packing.family), "longest_strip", lambda self, transformer: 7)
    assert strips_of(packing, [3, 12, 7]) == (6, (1, 2, 2))
    assert strips_of(packing, [3, 7, 7]) == (7, (1, 1, 1))


def data_of(folder: Path, place: Path, tokens: ModelTokens = TINY_WAN, **settings: Any) -> TrainingData:
    config = in_process("none", folder, place, **{**LENGTH, **settings})  # type: ignore[arg-type]
    return make_data(config, SPEC, tokens)


def padding_of(data: TrainingData) -> float:
    """Return the share of padding among the tokens of an epoch, and check the limit of each batch."""
    plan, lengths = data.sampler.plan(0), data.num_tokens
    computed = [len(batch) * lengths[batch].max() for batch in plan.batches()]
    limit = getattr(data.sampler.config, "max_tokens", None)
    assert limit is None or max(computed) <= limit
    assert sorted(plan.indices.tolist()) == np.flatnonzero(lengths > 0).tolist()
    return float(1 - lengths[plan.indices].sum() / sum(computed))


def test_strategies_and_buckets_change_how_much_is_padding(prepared_dir: Path, tmp_path: Path) -> None:
    padding = {
        name: padding_of(data_of(prepared_dir, tmp_path, length_strategy=name)) for name in ("random", "sorted")
    }
    assert padding["sorted"] < padding["random"]
    buckets = [padding_of(data_of(prepared_dir, tmp_path, length_buckets=count)) for count in (1, 3)]
    assert buckets[1] < buckets[0]
    by_count = data_of(prepared_dir, tmp_path, max_tokens=None, train_batch_size=3)
    assert max(map(len, by_count.sampler.plan(0).batches())) == 3
    assert padding_of(by_count) >= 0


def test_text_in_one_sequence_counts_in_each_row(prepared_dir: Path, tmp_path: Path) -> None:
    data = data_of(prepared_dir, tmp_path, ModelTokens(width=96, text_tokens=32))
    plan = data.sampler.plan(0)
    assert max(len(batch) * (data.num_tokens[batch].max() + 32) for batch in plan.batches()) <= 640


def test_the_largest_step_counts_padding(prepared_dir: Path, tmp_path: Path) -> None:
    data = data_of(prepared_dir, tmp_path, length_strategy="random")
    step, plan = data.largest_step(), data.sampler.plan(0)
    computed = [len(batch) * int(data.num_tokens[batch].max()) for batch in plan.batches()]
    assert step.tokens == max(computed)
    assert len({*step.sizes}) == 1
    assert sum(SPEC.num_tokens(size) for size in step.sizes) == step.tokens


def test_a_few_rows_that_fit_no_batch_are_rejected_by_name_and_many_are_an_error(tmp_path: Path, caplog) -> None:
    few = data_of(prepared(tmp_path / "few", panoramas=1), tmp_path, UNLIMITED, max_tokens=200)
    assert "1 row fits no batch and is rejected as too_large: pano0.png" in caplog.text
    assert few.sampler.plan(0).kept == 40
    with pytest.raises(OversizeError, match=r"pano0.png takes 256 tokens and exceeds `max_tokens=200`"):
        data_of(prepared(tmp_path / "many", panoramas=9), tmp_path, UNLIMITED, max_tokens=200)


def test_cached_views_of_several_sizes_are_refused_by_name(prepared_dir: Path) -> None:
    rows = SampleRows.of(
        data := PreparedDataset.load(prepared_dir),
        data.open_table,
        counting=TINY_WAN,
        rules=ConditionRules(),
        drop=None,
        resize=RandomResize(spec=SPEC),
        views=None,
    )
    way = way_of(BatchConfig(batching="length"))
    plan = way.plan(EpochConfig(), cost_model=CostModel.for_transformer(96), accumulation_steps=1)
    with pytest.raises(BucketingError, match=r'several sizes.* Give `cached_views="all"` or "first", or train packs'):
        way.sampler(rows, plan)


def test_held_out_rows_come_in_order_and_each_once(prepared_dir: Path, tmp_path: Path) -> None:
    config = in_process("none", prepared_dir, tmp_path, validation_split=0.3, **LENGTH)  # type: ignore[arg-type]
    held_out = make_held_out_data(config, SPEC, TINY_WAN)
    assert held_out is not None
    plans = [held_out.sampler.plan(epoch).indices.tolist() for epoch in (0, 1)]
    assert plans[0] == plans[1]
    assert sorted(plans[0]) == np.flatnonzero(held_out.num_tokens > 0).tolist()


@pytest.mark.parametrize(("settings", "message"), [
    ({"streaming": True, "steps_per_epoch": 3}, "`batching=\"length\"` plans batches by the lengths of all rows"),
    ({"random_resize": 32}, "Omit `random_resize`: no effect with `batching=length`"),
    ({"token_drop_rate": 0.5}, "Omit `token_drop_rate`: no effect with `batching=length`"),
    ({"remainder": "drop"}, "Omit `remainder`: no effect with `batching=length`"),
    ({"length_strategy": "sorted", "length_buckets": 3}, "Omit `length_buckets`: no effect unless"),
    ({"batching": "bucket", "length_strategy": "sorted"}, "Omit `length_strategy`: no effect with `batching=bucket`"),
])  # fmt: skip
def test_settings_without_effect_and_streams_are_refused_by_name(
    settings: dict[str, Any], message: str, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(BucketingError, match=re.escape(message)):
        Trainer(in_process(pipeline_dir, prepared_dir, tmp_path, **{**LENGTH, **settings}))


@pytest.mark.slow
def test_a_resumed_run_repeats_the_losses_of_a_whole_one_and_its_logs_count_every_row(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**LENGTH, "lora_rank": 2, "max_train_steps": None, "num_train_epochs": 2, "validation_split": 0.2}
    settings |= {"checkpointing_steps": 2, "log_tflops": True}
    out = tmp_path / "out"
    whole = run(in_process(pipeline_dir, prepared_dir, out, **settings))
    lines = read_log(out, "losses")
    assert all(0 < line["fill"] <= 1 for line in lines)
    assert all(line["hardware_tflops"] > line["model_tflops"] for line in lines if line["samples"] > 1)
    assert recount(Logs(out)).faults == []
    again = run(in_process(pipeline_dir, prepared_dir, out, **settings, resume_from_checkpoint="checkpoint-2"))
    assert again == pytest.approx(whole, abs=1e-6)
    assert read_log(out, "validation")[-1]["validation_loss"] > 0
    assert "size in padded batches (frames×height×width)" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_plan_and_a_dry_run_say_how_much_is_padding(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path, **LENGTH, length_strategy="random", dry_run=True)
    lines = "\n".join(Trainer(config).describe())
    assert "Batching = length, mixed precision = no" in lines
    assert re.search(r"Tokens per step and process = .* of 640 filled, at most \d+\.\d% padding", lines)


@pytest.mark.every
def test_two_processes_train_every_row_once(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ("--batching", "length", "--max_tokens", 640, "--num_train_epochs", 2, "--lora_rank", 2)
    train(pipeline_dir, prepared_dir, out, *flags, num_processes=2)
    assert recount(Logs(out)).faults == []
    rows = data_of(prepared_dir, tmp_path).sampler.plan(0).kept
    assert [counted.seen for counted in count_samples(out)] == [rows, rows]
    assert all(len(set(counted.steps)) == 1 for counted in count_samples(out))


@pytest.mark.slow
def test_two_processes_that_share_their_samples_have_the_losses_of_one(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**LENGTH, **STABLE, "lora_rank": 2, "max_train_steps": 3}
    shared = as_flags(**settings, context_parallel_degree=2)
    train(pipeline_dir, prepared_dir, tmp_path / "two", *shared, num_processes=2)
    expected = run(in_process(pipeline_dir, prepared_dir, tmp_path / "one", **settings))
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
