"""Every setting of a run does something, and impossible ones are errors."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hf_bucketing import BucketingError, CostModel, Size
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.rows import TrainingData, make_data
from hf_bucketing.batching.sample_rows import ModelTokens
from hf_bucketing.batching.ways import make_step
from hf_bucketing.columns import CacheInfo, PreparedDataset
from hf_bucketing.command_line.flags import FlagParser, from_flags
from hf_bucketing.errors import OversizeError
from hf_bucketing.media import ViewRule, write_video
from hf_bucketing.models.registry import families, recipe_of
from hf_bucketing.packing import packed_forward
from hf_bucketing.packing.texts import TextTokens
from hf_bucketing.runs.review import losses_of
from hf_bucketing.settings import changed
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer
from tests.conftest import run_script_here
from tests.training.training_cases import TINY_WAN, in_process, run


@pytest.fixture
def data(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> Callable[..., TrainingData]:
    """Make the data of a run with some settings, without a model."""
    spec = PreparedDataset.load(prepared_dir).spec
    return lambda **settings: make_data(in_process(pipeline_dir, prepared_dir, tmp_path, **settings), spec, TINY_WAN)


def tokens_per_batch(data: TrainingData) -> list[int]:
    plan = data.sampler.plan(0)
    return np.add.reduceat(data.num_tokens[plan.indices], plan.offsets[:-1]).tolist()


def test_a_bucket_batch_has_the_given_samples_or_tokens(data) -> None:
    for size in (2, 5):
        plan = data(train_batch_size=size).sampler.plan(0)
        assert max(np.diff(plan.offsets)) == size
    assert 150 < max(tokens_per_batch(data(max_tokens=300))) <= 300
    assert max(tokens_per_batch(data(max_tokens=600))) > 300


def test_max_tokens_holds_the_text_where_it_sits_in_the_sequence(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    spec = PreparedDataset.load(prepared_dir).spec
    for batching in ({}, {**PACKED, "strip_length": 1}):
        config = in_process(pipeline_dir, prepared_dir, tmp_path, **{**batching, "max_tokens": 300})
        apart, joint = (make_data(config, spec, ModelTokens(width=96, text_tokens=tokens)) for tokens in (0, 50))
        plan, longest = joint.sampler.plan(0), []
        for data in (apart, joint):
            lengths = joint.lengths_of(data.sampler.plan(0).indices, epoch=0)
            longest.append(max(np.add.reduceat(lengths, data.sampler.plan(0).offsets[:-1])))
        assert 200 < longest[1] <= 300 < longest[0], "the text of the longest batch, counted or not"
        assert joint.lengths_of(plan.indices, epoch=0).tolist() == [n + 50 for n in joint.num_tokens[plan.indices]]
        weights = [data.loss_weights(plan.indices, epoch=0).tolist() for data in (apart, joint)]
        assert weights[0] == weights[1], "a loss has no tokens of text"
        with pytest.raises(BucketingError, match="exceeds `max_tokens=300`"):
            make_data(config, spec, ModelTokens(width=96, text_tokens=300))


@pytest.mark.slow
def test_a_run_counts_the_text_that_its_family_says_is_in_the_sequence(
    pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    from hf_bucketing.training import estimate as memory

    wan, flux = (families()[f"{name}Transformer{dims}DModel"] for name, dims in (("Wan", 3), ("Flux", 2)))
    assert (wan.text.in_sequence, flux.text.in_sequence) == (False, True)
    config = in_process(pipeline_dir, prepared_dir, tmp_path, max_train_steps=1, batching="pack", max_tokens=400)
    assert Trainer(config).data.text_tokens == 0
    monkeypatch.setattr(TextTokens, "in_sequence", True)
    recipe = recipe_of(str(pipeline_dir))
    assert (recipe.text_tokens(), recipe.text_tokens(32)) == (512, 32)
    trainer = Trainer(config)
    assert trainer.data.text_tokens == 32
    shape = memory.plan_of_run(trainer.opened, trainer.data).shape
    assert shape.text_tokens == 32 * shape.samples
    assert shape.length == shape.tokens + shape.text_tokens <= 400
    trainer.run()
    (entry,) = [json.loads(line) for line in (tmp_path / "logs" / "losses.jsonl").read_text().splitlines()]
    rows = trainer.data.sampler.plan(0).batch(0)
    assert entry["tokens"] == int(trainer.data.num_tokens[rows].sum()) + 32 * len(rows)
    assert 0 < entry["fill"] <= 1


def test_each_remainder_policy_treats_the_samples_that_fill_no_batch_in_its_own_way(data) -> None:
    short, drop, repeat = (data(train_batch_size=3, remainder=name).sampler.plan(0) for name in
                           ("short", "drop", "repeat"))  # fmt: skip
    sizes = [np.diff(plan.offsets).tolist() for plan in (short, drop, repeat)]
    assert (short.kept, short.repeated) == (20, 0)
    assert min(sizes[0]) < 3
    assert drop.kept == 3 * len(sizes[1]) < 20
    assert set(sizes[1]) == {3}
    assert repeat.kept == 20
    assert repeat.repeated == sum(sizes[2]) - 20 > 0
    for batch in repeat.batches():
        assert len(batch) == len(set(batch.tolist()))


def test_the_most_expensive_step_comes_first_on_request(data) -> None:
    first = {seed: tokens_per_batch(data(seed=seed, longest_first=True)) for seed in range(3)}
    assert all(tokens[0] == max(tokens) for tokens in first.values())
    assert any(tokens[0] < max(tokens) for tokens in (tokens_per_batch(data(seed=seed)) for seed in range(3)))


PACKED = {"batching": "pack", "max_tokens": 640, "strip_length": 16}


def test_packs_hold_whole_strips_within_max_tokens(data) -> None:
    for strip_length in (1, 16, 64):
        packed = data(**{**PACKED, "strip_length": strip_length})
        plan = packed.sampler.plan(0)
        spans = -(-packed.num_tokens[plan.indices] // strip_length) * strip_length
        assert max(np.add.reduceat(spans, plan.offsets[:-1])) <= 640
    assert len(data(**{**PACKED, "strip_length": 1}).sampler.plan(0).offsets) <= len(plan.offsets)


def test_the_strategy_and_balance_of_packs_reach_their_plan(data) -> None:
    for strategy in ("sequential", "first_fit", "best_fit_decreasing"):
        assert data(**PACKED, pack_strategy=strategy).sampler.config.strategy == strategy
    plain, balanced = (data(**PACKED, balance=name).sampler.config for name in ("none", "cost"))
    assert (plain.balance, plain.cost_model) == ("none", None)
    assert (balanced.balance, balanced.cost_model) == ("cost", CostModel.for_transformer(96))


def test_random_resizing_draws_smaller_sizes_in_every_epoch_and_not_below_the_minimum(data) -> None:
    packed = data(**PACKED, random_resize=32)
    rows = np.flatnonzero(packed.num_tokens > 0)
    own, drawn = packed.num_tokens[rows], [packed.tokens_of(rows, epoch=epoch) for epoch in range(2)]
    assert all((tokens <= own).all() for tokens in drawn)
    assert (drawn[0] != drawn[1]).any()
    smallest = packed.table.spec.num_tokens(Size(1, 32, 32))
    assert min(map(min, drawn)) >= smallest


def test_samples_or_tokens_have_equal_weight_in_the_loss(data) -> None:
    by_sample, by_token = data(**PACKED), data(**PACKED, loss_reduction="token")
    rows = by_sample.sampler.plan(0).batch(0)
    assert by_sample.loss_weights(rows, epoch=0).tolist() == [1.0] * len(rows)
    assert by_token.loss_weights(rows, epoch=0).tolist() == by_token.num_tokens[rows].tolist()


def test_the_seed_changes_plans_views_noise_and_dropped_captions(
    data, pipeline_dir, prepared_dir, tmp_path: Path, column_reads
) -> None:
    one, other = data(seed=1), data(seed=2)
    assert one.sampler.plan(0).indices.tolist() != other.sampler.plan(0).indices.tolist()
    assert (one.loader.collate_fn.seed, other.loader.collate_fn.seed) == (1, 2)
    recipe = recipe_of(str(pipeline_dir)).load(str(pipeline_dir))
    config = in_process(pipeline_dir, prepared_dir, tmp_path, seed=7, caption_dropout=0.25, weighting_scheme="uniform")
    step = make_step(config, recipe)
    assert (step.seed, step.objective.seed) == (7, 7)
    assert (step.caption_dropout, step.objective.weighting_scheme) == (0.25, "uniform")
    assert make_step(changed(config, weighting_scheme=None), recipe).objective.weighting_scheme == "logit_normal"


def test_snr_weighting_reaches_the_objective_of_denoising_models_alone(
    pipeline_dirs, prepared_dir, tmp_path: Path
) -> None:
    for family, message in (("latte", None), ("wan", "`snr_gamma` weights denoising losses")):
        folder = pipeline_dirs[family]
        config = in_process(folder, prepared_dir, tmp_path, snr_gamma=5.0)
        recipe = recipe_of(str(folder)).load(str(folder))
        if message is None:
            assert make_step(config, recipe).objective.snr_gamma == 5.0
        else:
            with pytest.raises(BucketingError, match=message):
                make_step(config, recipe)


def test_the_shift_reaches_the_objective_of_flow_models_alone(pipeline_dirs, prepared_dir, tmp_path: Path) -> None:
    recipes = {name: recipe_of(str(folder)).load(str(folder)) for name, folder in pipeline_dirs.items()}

    def levels(name: str, height: int, width: int, **settings: Any) -> torch.Tensor:
        config = in_process(pipeline_dirs[name], prepared_dir, tmp_path, **settings)
        latents = [torch.zeros(1, 1, height, width)] * 20
        return make_step(config, recipes[name]).objective(latents, indices=range(20), epoch=0).timesteps / 1000

    small, large = (4, 4), (60, 104)
    fixed = levels("wan", *small)
    assert torch.equal(fixed, levels("wan", *large))
    assert torch.equal(fixed, levels("wan", *small, shift=3.0))
    assert torch.equal(fixed, levels("wan", *large, shift="resolution"))
    lower = levels("wan", *large, shift="480x832:2,720x1280:5")
    assert torch.allclose(fixed / (1 - fixed) / 3, lower / (1 - lower) / 2, rtol=1e-3)
    for name, law in (("wan", "pixels"), ("wan", "tokens"), ("ltx", None), ("ltx", "unbounded")):
        assert (levels(name, *small, shift=law) < levels(name, *large, shift=law)).all(), law
    assert (levels("ltx", *large, shift="unbounded") > levels("ltx", *large)).all()
    paths = ("--pretrained_model_name_or_path", "m", "--dataset_dir", "d", "--output_dir", "o")
    for text, value in (("3", 3.0), ("pixels", "pixels"), ("480x832:2,720x1280:5", "480x832:2,720x1280:5")):
        flags = FlagParser(None, TrainingConfig).parse_args([*paths, "--shift", text])
        assert from_flags(TrainingConfig, flags).objective.shift == value
    with pytest.raises(BucketingError, match="`shift` is about the noise levels of a flow"):
        levels("latte", *small, shift=3.0)


def test_the_guidance_reaches_the_step_of_models_that_embed_one_alone(
    pipeline_dirs, prepared_dir, tiny_folder, tmp_path: Path
) -> None:
    folder = tiny_folder("flux")
    for batching in ({}, PACKED):
        for settings, scale in (({}, 1.0), ({"guidance": 3.5}, 3.5), ({"guidance": 0.0}, 0.0)):
            recipe = recipe_of(str(folder)).load(str(folder))
            config = in_process(folder, prepared_dir, tmp_path, **batching, **settings)
            assert make_step(config, recipe).recipe.guidance == scale
    paths = ("--pretrained_model_name_or_path", "m", "--dataset_dir", "d", "--output_dir", "o")
    flags = FlagParser(None, TrainingConfig).parse_args([*paths, "--guidance", "3.5"])
    assert from_flags(TrainingConfig, flags).flat()["guidance"] == 3.5
    wan = recipe_of(str(pipeline_dirs["wan"])).load(str(pipeline_dirs["wan"]))
    with pytest.raises(BucketingError, match="`guidance` is the scale that distilled models embed"):
        make_step(in_process(pipeline_dirs["wan"], prepared_dir, tmp_path, guidance=1.0), wan)


class Enabled(NamedTuple):
    """A step, and the tokens of its packs."""

    step: PackStep
    lengths: list[int]


@pytest.fixture
def packed_step(pipeline_dirs, prepared_dir, tmp_path: Path, monkeypatch) -> Callable[..., Enabled]:
    """Make the step of a run on packs, and run it on two samples of one size."""

    def make(family: str = "wan", **settings: Any) -> Enabled:
        folder = pipeline_dirs[family]
        recipe = recipe_of(str(folder)).load(str(folder))
        step = make_step(in_process(folder, prepared_dir, tmp_path, **PACKED, **settings), recipe)
        lengths: list[int] = []
        monkeypatch.setattr("hf_bucketing.batching.own_sizes.packed_forward", lambda transformer, pack: lengths.extend(
            pack.layout.lengths) or packed_forward(transformer, pack))  # fmt: skip
        recipe.transformer.train()
        pixels = torch.rand(2, 3, 1, 64, 64, generator=torch.Generator().manual_seed(0))
        batch = {"pixel_values": list(pixels), "caption": ["red", "blue"], "index": [3, 4], "fps": [0.0, 0.0]}
        losses.append(step(recipe.transformer, batch, epoch=0).values.detach())
        return Enabled(step, lengths)

    losses = make.losses = []
    return make


def test_positions_and_the_attention_backend_of_packs_reach_the_model(packed_step) -> None:
    native = packed_step().step.packing
    assert (native.backend, native.base_size) == ("auto", None)
    step = packed_step(positions="interpolate", base_size=[1, 2, 2], attention_backend="dense").step
    assert (step.packing.backend, tuple(step.packing.base_size)) == ("dense", (1, 2, 2))
    plain, stretched = packed_step.losses
    assert not torch.allclose(plain, stretched, rtol=1e-6), "the samples have other positions"


def test_tokens_are_dropped_from_packs_and_fewer_are_planned(packed_step, data) -> None:
    whole = packed_step().lengths
    half = packed_step(token_drop_rate=0.5).lengths
    assert half == [count // 2 for count in whole]
    assert packed_step(token_drop_rate=0.5, seed=1).lengths == half
    assert not torch.allclose(*packed_step.losses[1:]), "the seed of the run draws what is dropped"
    assert packed_step(token_drop_rate=0.5, token_drop_mode="frames").lengths == whole, "one frame is kept"
    full, dropped = data(**PACKED), data(**PACKED, token_drop_rate=0.5)
    used = full.num_tokens > 0
    assert (dropped.num_tokens[used] == np.floor(full.num_tokens[used] * 0.5 + 0.5)).all()
    assert len(dropped.sampler.plan(0).offsets) < len(full.sampler.plan(0).offsets)


def test_models_that_cannot_drop_tokens_refuse_it_before_the_first_step(packed_step) -> None:
    with pytest.raises(BucketingError, match=r"`token_drop_rate`.*LatteTransformer3DModel does more than attention"):
        packed_step("latte", token_drop_rate=0.5)


@pytest.mark.parametrize(("settings", "message"), [
    ({"positions": "interpolate", "base_size": [1, 2, 2]}, "Omit `positions`, `base_size`: no effect"),
    ({"attention_backend": "dense"}, "Omit `attention_backend`"),
    ({"token_drop_rate": 0.5}, "Omit `token_drop_rate`"),
    ({**PACKED, "positions": "interpolate"}, "`positions=\"interpolate\"` and `base_size` go together"),
    ({**PACKED, "base_size": [1, 2, 2]}, "`positions=\"interpolate\"` and `base_size` go together"),
    ({**PACKED, "positions": "interpolate", "base_size": [1, 2]}, "`base_size` must be three"),
    ({**PACKED, "token_drop_mode": "tube"}, "Omit `token_drop_mode`"),
    ({**PACKED, "token_drop_rate": 1.5}, "`token_drop_rate` must be"),
])  # fmt: skip
def test_settings_of_packs_are_refused_where_they_have_no_effect(
    pipeline_dir, prepared_dir, tmp_path: Path, settings: dict, message: str
) -> None:
    with pytest.raises(BucketingError, match=message):
        in_process(pipeline_dir, prepared_dir, tmp_path, **settings)


def test_base_size_is_a_flag_of_three_numbers(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    parser = FlagParser("")
    parser.add_settings(TrainingConfig)
    args = ["--pretrained_model_name_or_path", "m", "--dataset_dir", "d", "--output_dir", "o", "--batching", "pack",
            "--max_tokens", "64", "--positions", "interpolate", "--base_size", "1", "2", "3"]  # fmt: skip
    assert from_flags(TrainingConfig, parser.parse_args(args)).batches.base_size == [1, 2, 3]


def test_the_settings_of_views_reach_the_collator(pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(ffmpeg_major_version=8))
    views = {"random_crop": False, "frame_picking": "uniform", "flip_probability": 0.3, "video_decoder": "torchcodec"}
    config = in_process(pipeline_dir, prepared_dir, tmp_path, **views)
    spec = PreparedDataset.load(prepared_dir).spec
    rule = ViewRule(random_crop=False, frame_picking="uniform", flip_probability=0.3, video_decoder="torchcodec")
    assert make_data(config, spec, TINY_WAN).loader.collate_fn.views == rule
    packs = changed(config, batching="pack", max_tokens=640, random_resize=32)
    collator = make_data(packs, spec, TINY_WAN).loader.collate_fn
    assert (collator.views, collator.resize.min_side) == (rule, 32)


@pytest.mark.parametrize("setting", [
    {"random_crop": False}, {"frame_picking": "start"}, {"flip_probability": 0.5}, {"video_decoder": "torchcodec"},
])  # fmt: skip
def test_cached_latents_refuse_what_changes_decoding(
    pipeline_dir, prepared_dir, tmp_path, monkeypatch, setting
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", SimpleNamespace(ffmpeg_major_version=8))
    cache = CacheInfo(
        folder="cache", batching="bucket", latents_model="m", text_model=None, empty_text_key=None, views={}
    )
    prepared = dataclasses.replace(PreparedDataset.load(prepared_dir), cache=cache)
    prepared.save(tmp_path / "cached")
    config = in_process(pipeline_dir, tmp_path / "cached", tmp_path, **setting)
    with pytest.raises(BucketingError, match=f"Omit `{next(iter(setting))}`: .* holds encoded latents"):
        make_data(config, prepared.spec, TINY_WAN)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.slow
def test_the_8_bit_optimizer_trains_and_resumes(pipeline_dir, prepared_dir, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", minversion="0.50", reason="older ones take no steps on a CPU")
    eight = {"optimizer": "adamw_8bit", "max_train_steps": 4, "checkpointing_steps": 2}
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path / "whole", **eight))
    assert type(trainer.trained.optimizer.optimizer).__name__ == "AdamW8bit"
    trainer.run()
    whole = losses_of(tmp_path / "whole")
    parts = in_process(pipeline_dir, prepared_dir, tmp_path / "parts", **{**eight, "max_train_steps": 2})
    run(parts)
    assert run(changed(parts, max_train_steps=4, resume_from_checkpoint="latest")) == whole


@pytest.mark.slow
def test_samples_beyond_the_models_positions_are_refused_before_training(
    pipeline_dirs, media_dir, tmp_path: Path
) -> None:
    latte = pipeline_dirs["latte"]
    prepare = ("prepare_dataset.py", "--dataset", media_dir, "--pretrained_model_name_or_path", latte)
    prepare += ("--target_fps", 8, "--bucket_tokens", "1000", "--bucket_frames", "1,17,25")
    prepare += ("--output_dir", tmp_path / "p")
    run_script_here(*prepare)
    config = in_process(latte, tmp_path / "p", tmp_path, batching="pack", max_tokens=4000)
    with pytest.raises(BucketingError, match=r"cannot take the \d+ samples of .* 16 positions for frames"):
        Trainer(config)
    run_script_here(*prepare, "--max_frames", 16)
    data = PreparedDataset.load(tmp_path / "p")
    sizes = Trainer(config).data.sizes(np.arange(len(data.dataset)))
    cut = [min(frames, 16) for frames in data.dataset["num_frames"]]
    assert [size.frames for size in sizes] == cut
    assert max(data.dataset["num_frames"]) > 16
    assert len(run(config)) == 3


def test_a_row_that_exceeds_the_limit_of_packs_is_told_what_numbers_of_frames_keep(
    pipeline_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "clips").mkdir()
    for frames, (height, width) in {17: (48, 80), 49: (64, 96), 161: (64, 96), 481: (96, 96)}.items():
        write_video(tmp_path / "clips" / f"{frames}.mp4", np.zeros((frames, height, width, 3), np.uint8), fps=8)
        (tmp_path / "clips" / f"{frames}.txt").write_text("a clip")
    prepare = ("prepare_dataset.py", "--dataset", tmp_path / "clips", "--pretrained_model_name_or_path", pipeline_dir)
    prepare += ("--target_fps", 8, "--buckets", "64,96", "--output_dir", tmp_path / "p", "--max_frames")
    run_script_here(*prepare, "none")
    config = in_process(pipeline_dir, tmp_path / "p", tmp_path, batching="pack", max_tokens=512)
    with pytest.raises(OversizeError) as raised:
        Trainer(config)
    message = str(raised.value)
    assert "takes 4416 tokens, in strips of 64, and exceeds `max_tokens=512` (2 of" in message
    assert "with --clips all --clip_frames 53 beside it" in message
    assert re.findall(r"--max_frames (\d+) \(keeps (\d) rows\)", message) == [("81", "3"), ("53", "4")]
    run_script_here(*prepare, 53)
    assert Trainer(config).data.sampler.plan(0).kept == 4
    run_script_here(*prepare, 81)
    with pytest.raises(OversizeError, match=r"\(1 of 4 rows do\)"):
        Trainer(config)
    run_script_here(*prepare, 53, "--clips", "all", "--clip_frames", 53)
    assert Trainer(config).data.sampler.plan(0).kept == 1 + 1 + 4 + 10


@pytest.mark.parametrize("batching", [{}, PACKED], ids=["bucket", "pack"])
def test_videos_and_missing_captions_are_refused_before_training(
    batching, pipeline_dir, prepared_dir, tmp_path: Path, monkeypatch
) -> None:
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", **batching)
    monkeypatch.setattr(type(recipe_of(str(pipeline_dir)).family), "limits", lambda *args: (1, 999, 999))
    with pytest.raises(BucketingError, match=r"cannot take the \d+ samples of \d+×.* 1 positions for frames"):
        Trainer(config)
    prepared = PreparedDataset.load(prepared_dir)
    dataclasses.replace(prepared, caption_column=None).save(tmp_path / "silent")
    with pytest.raises(BucketingError, match="have no captions, which the model needs"):
        make_data(changed(config, dataset_dir=str(tmp_path / "silent")), prepared.spec, TINY_WAN)


@pytest.mark.parametrize("change", [
    {"batching": "both"}, {"mixed_precision": "fp8"}, {"weighting_scheme": "cosmap"}, {"max_train_steps": 0},
    {"max_tokens": "much"}, {"max_tokens": 0}, {"caption_dropout": 2.0}, {"lora_alpha": 4}, {"balance": "cost"},
    {"remainder": "drop", "batching": "pack", "max_tokens": 9},
    {"optimizer": "sgd"}, {"seed": -1}, {"dataloader_num_workers": -1}, {"lr_warmup_steps": 5},
    {"video_decoder": "ffmpeg"}, {"shift": "large"}, {"shift": 0.0}, {"guidance": -1.0}, {"guidance": float("nan")},
])  # fmt: skip
def test_impossible_settings_are_errors(change) -> None:
    with pytest.raises(BucketingError):
        TrainingConfig.from_flat(pretrained_model_name_or_path="m", dataset_dir="d", output_dir="o", **change)
