"""Preservation and sliders: targets that are predictions of the base model, in stacks and packs, exactly repeated."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_bucketing import BucketingError, CacheError, ColumnError
from hf_bucketing.adapters.loading import base_model
from hf_bucketing.adapters.lora import add_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import media_of, text_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.rows import make_data
from hf_bucketing.batching.steps import Step, base_targets
from hf_bucketing.batching.ways import make_step
from hf_bucketing.columns import PreparedDataset
from hf_bucketing.columns.preparation import with_marks
from hf_bucketing.columns.prepared_stream import PreparedStream
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.columns.trainer_toml import load_toml
from hf_bucketing.configuration.objective import PreservationConfig
from hf_bucketing.media.rows import REGULARIZATION
from hf_bucketing.models import disable_packing, enable_packing
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.samples import Samples
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import read_log, read_sample_logs
from hf_bucketing.training.loop import Trainer, train
from tests.caching.test_caching import cached, collator_of, first, load_recipe, prepared
from tests.conftest import run_script_here
from tests.training.conftest import reset
from tests.training.test_steps import OPTIONS, make_batch
from tests.training.training_cases import TINY_WAN, in_process, run, train as launch_run

__all__ = ["prepared"]

PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16, "train_batch_size": 1}
LORA = {"lora_rank": 2, "gradient_checkpointing": True}
PRIOR = {"preservation": "prior", "preservation_share": 0.5, "preservation_weight": 0.25}
CASES = {
    "prior": PreservationConfig(**PRIOR),
    "blank": PreservationConfig(preservation="blank", preservation_weight=3.0),
    "class": PreservationConfig(preservation="class", preservation_caption="a green circle", preservation_share=1.0),
    "slider": PreservationConfig(slider=["a red square | blue", "white|"], slider_strength=2.5, **PRIOR),
}


def doubled(folder: Path) -> Recipe:
    recipe = load_recipe(folder)
    for name in ("transformer", "text_encoder", "vae"):
        getattr(recipe.pipeline, name).double()
    return recipe


def adapted(folder: Path) -> Recipe:
    """Load a pipeline with adapters that change its predictions."""
    recipe = doubled(folder)
    add_adapters(recipe.transformer, AdapterConfig(lora_rank=2))
    generator = torch.Generator().manual_seed(3)
    for name, weight in recipe.transformer.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64) / 4
    return recipe


def losses_by_hand(case: str, recipe: Recipe, base: Recipe, batch: dict[str, Any]) -> list[float]:
    """Score each sample alone, with the untouched pipeline as the base model."""
    config, objective = CASES[case], recipe.objective(**OPTIONS)
    latents = media_of(recipe, batch)["latents"]
    noised = objective(latents, indices=batch["index"], epoch=2)
    targets = base_targets(config, batch, [(0, 2, index) for index in batch["index"]])
    losses = []

    def predict(model: Recipe, caption: str, row: int) -> torch.Tensor:
        text = text_of(recipe, {"caption": batch["caption"][row : row + 1]}, captions=[caption]).to(torch.float64)
        alone = noised._replace(
            latents=[noised.latents[row]],
            targets=[noised.targets[row]],
            timesteps=noised.timesteps[row : row + 1],
            clean=[noised.clean[row]],
        )
        samples = Samples(noised=alone, text=text, fps=torch.tensor(batch["fps"][row : row + 1]))
        prediction = model.predict(model.transformer, samples, model.model_inputs(samples))
        if targets[row] is None:
            losses.append(float(objective.losses(prediction, alone)))
        return prediction[0]

    for row, (target, caption) in enumerate(zip(targets, batch["caption"], strict=True)):
        if target is not None and target.caption is not None:
            caption = target.caption
        prediction = predict(recipe, caption, row)
        if target is None:
            continue
        wanted = predict(base, caption, row)
        if target.pair is not None:
            plus, minus = (predict(base, text, row) for text in target.pair)
            wanted = wanted + config.slider_strength * (plus - minus)
        losses.append(target.weight * float((prediction - wanted).square().mean()))
    return losses


@pytest.mark.cases(fast=("wan-5-prior",), slow=("*",))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("family", "frames"), [("wan", 5), pytest.param("ltx", 9, marks=pytest.mark.slow)])
@torch.no_grad()
def test_losses_towards_the_base_model_are_those_by_hand(case: str, family: str, frames: int, pipeline_dirs) -> None:
    recipe, base = adapted(pipeline_dirs[family]), doubled(pipeline_dirs[family])
    batch = {**make_batch(frames), REGULARIZATION: [False, True, False]}
    by_hand = losses_by_hand(case, recipe, base, batch)
    common = {"recipe": recipe, "objective": recipe.objective(**OPTIONS), "preservation": CASES[case]}
    stacked: Step = BucketStep(**common)
    losses = {"bucket": stacked(recipe.transformer, batch, epoch=2).values.tolist()}
    packed: Step = PackStep(**common, packing=enable_packing(recipe.transformer, strip_length=8))
    pack = {**batch, "pixel_values": list(batch["pixel_values"])}
    losses["pack"] = packed(recipe.transformer, pack, epoch=2).values.tolist()
    disable_packing(recipe.transformer)
    for values in losses.values():
        assert values == pytest.approx(by_hand, rel=1e-6, abs=1e-9)
    plain: Step = BucketStep(recipe=recipe, objective=recipe.objective(**OPTIONS))
    assert plain(recipe.transformer, batch, epoch=2).values[1].item() != pytest.approx(by_hand[1], rel=1e-2)


def test_which_samples_are_preserved_follows_from_their_keys_and_marks() -> None:
    keys = [(0, 0, index) for index in range(400)]
    chosen = base_targets(CASES["prior"], {}, keys)
    assert 160 < sum(target is not None for target in chosen) < 240
    assert base_targets(CASES["prior"], {}, keys[7:9]) == chosen[7:9], "other samples do not matter"
    assert base_targets(CASES["prior"], {}, [(0, 1, key[2]) for key in keys]) != chosen, "nor does an epoch repeat"
    marked = base_targets(CASES["blank"], {REGULARIZATION: [True, False]}, keys[:2])
    assert [target and target.caption for target in marked] == ["", None]
    assert [bool(target) for target in marked] == [True, False]
    pairs = {target.pair.plus for target in base_targets(CASES["slider"], {}, keys) if target and target.pair}
    assert pairs == {"a red square", "white"}
    assert CASES["slider"].captions == ["a red square", "blue", "white", ""]


@pytest.mark.parametrize(
    "batches",
    [pytest.param({}, marks=pytest.mark.slow), pytest.param(PACK, marks=pytest.mark.every)],
    ids=["bucket", "pack"],
)
def test_the_base_model_stays_and_a_resumed_run_repeats_the_whole_one(
    batches, pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**batches, **LORA, **PRIOR, "slider": ["red|blue"], "gradient_accumulation_steps": 2}
    settings |= {"checkpointing_steps": 1, "max_train_steps": 2, "offload_activations": True}
    trainer = Trainer(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings))
    trainer.run()
    untouched, trained = load_recipe(pipeline_dir), trainer.recipe.transformer
    if batches:
        disable_packing(trained)
    inputs = {
        "hidden_states": torch.randn(1, untouched.latent_channels, 2, 4, 4),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 5, untouched.family.text_dim(untouched.transformer)),
    }
    with torch.no_grad():
        before, after = (model(**inputs).sample for model in (untouched.transformer, trained))
        assert not torch.equal(before, after), "the adapters learned"
        with base_model(trained):
            assert torch.equal(before, trained(**inputs).sample)
        assert torch.equal(after, trained(**inputs).sample)
    whole = losses_of(tmp_path / "out")
    reset()
    settings |= {"resume_from_checkpoint": "checkpoint-1"}
    assert run(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings)) == whole
    reset()
    with pytest.raises(BucketingError, match=r"preservation_share was 0\.5 and is 0\.25"):
        train(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **{**settings, "preservation_share": 0.25}))


def test_adapters_that_change_nothing_are_on_target(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    settings = {**LORA, "preservation": "prior", "preservation_share": 1.0, "max_train_steps": 1}
    assert run(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings)) == [0.0]


@pytest.mark.slow
def test_the_losses_of_learned_and_of_preserved_samples_are_logged_apart(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**LORA, **PRIOR, "gradient_accumulation_steps": 2}
    run(in_process(pipeline_dir, prepared_dir, tmp_path / "plain", **LORA, max_train_steps=1))
    run(in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings))
    (log,), lines = read_sample_logs(tmp_path / "out"), read_log(tmp_path / "out", "losses")
    by_hand: list[dict[str, list[float]]] = [{"data": [], "preservation": []} for _ in lines]
    for batch in log:
        keys = [(0, batch["epoch"], index) for index in batch["index"]]
        for target, loss in zip(base_targets(CASES["prior"], {}, keys), batch["loss"], strict=True):
            by_hand[batch["batch"] // 2]["data" if target is None else "preservation"].append(loss)
    assert any(all(parts.values()) for parts in by_hand)
    for line, parts in zip(lines, by_hand, strict=True):
        means = {f"loss_by_target/{name}": np.mean(losses) for name, losses in parts.items() if losses}
        assert {name: value for name, value in line.items() if "target" in name} == pytest.approx(means, abs=1e-6)
        assert line["train_loss"] == pytest.approx(np.mean([*parts["data"], *parts["preservation"]]), abs=1e-6)
    (plain,) = read_log(tmp_path / "plain", "losses")
    assert not [name for name in plain if "target" in name]


def test_captions_beside_those_of_rows_come_from_the_cache_or_are_refused(
    prepared: PreparedDataset, pipeline_dir: Path, tmp_path: Path
) -> None:
    recipe, rows = load_recipe(pipeline_dir), first(prepared, 3)
    settings = {"slider": ["a red square|nothing"], "train_batch_size": 2, "max_sequence_length": None, **LORA}
    found = {}
    for name, more in {"without": None, "with": ["a red square", "nothing"]}.items():
        keyed = cached(rows, recipe, tmp_path / "cache", batching="bucket", more_captions=more)
        keyed.save(tmp_path / name)
        config = in_process(pipeline_dir, tmp_path / name, tmp_path / "out", **settings)
        if more is None:
            with pytest.raises(CacheError, match=r"'a red square', .* --more_captions 'a red square'"):
                make_data(config, recipe.spec, TINY_WAN)
        else:
            data = make_data(config, recipe.spec, TINY_WAN)
            step = dataclasses.replace(make_step(config, recipe), texts=data.texts)
            batch = collator_of(keyed)([keyed.dataset[row] for row in (0,)])
            add_adapters(recipe.transformer, config.adapters)
            found["cached"] = step(recipe.transformer, batch, epoch=0).values
            encoded = {name: value for name, value in batch.items() if not name.startswith("text_")}
            found["encoded"] = step(recipe.transformer, encoded, epoch=0).values
    assert torch.allclose(found["cached"], found["encoded"], rtol=1e-4)


def test_settings_that_preserve_nothing_or_have_no_base_are_refused(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    refused = {
        r"train adapters \(`lora_rank`\)": {"preservation": "prior"},
        "`preservation_caption` go together": {"preservation": "class", **LORA},
        "Omit `preservation_weight`: no effect without `preservation`": {"preservation_weight": 2.0},
        "Omit `slider_strength`: no effect without `slider`": {"slider_strength": 2.0},
        "`preservation_weight` must be above 0": {"preservation": "prior", "preservation_weight": 0.0},
        r"two captions with one \| between, got 'red'": {"slider": ["red"]},
        "must be finite and not 0": {"slider": ["red|blue"], "slider_strength": 0.0},
        "needs at least one pair": {"slider": []},
    }
    for message, settings in refused.items():
        with pytest.raises(BucketingError, match=message):
            in_process(pipeline_dir, prepared_dir, tmp_path / "out", **settings)
    with pytest.raises(BucketingError, match=r"`preservation` preserves no sample: .* marks no rows"):
        train(in_process(pipeline_dir, prepared_dir, tmp_path / "out", preservation="prior", **LORA))


@pytest.mark.slow
def test_marks_come_from_sources_from_columns_and_from_sd_scripts(
    media_dir: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "sources.yaml").write_text(
        "sources:\n"
        f"  - {{dataset: {media_dir}, name: learned}}\n"
        f"  - {{dataset: {media_dir}, name: kept, is_regularization: true}}\n"
    )
    flags = ("--pretrained_model_name_or_path", pipeline_dir, "--config", tmp_path / "sources.yaml")
    flags += ("--target_fps", 8, "--bucket_tokens", "60,110,150", "--bucket_frames", "1,9,17,25")
    run_script_here("prepare_dataset.py", *flags, "--output_dir", tmp_path / "rows")
    rows = PreparedDataset.load(tmp_path / "rows").dataset
    assert [bool(mark) for mark in rows[REGULARIZATION]] == [row == 1 for row in rows["hf_bucketing_source"]]
    run_script_here("prepare_dataset.py", *flags, "--output_dir", tmp_path / "stream", "--streaming")
    config = in_process(pipeline_dir, tmp_path / "rows", tmp_path / "out", preservation="prior", **LORA)
    recipe = load_recipe(pipeline_dir)
    batches = [*make_data(config, recipe.spec, TINY_WAN).loader]
    marks = {index: mark for batch in batches for index, mark in zip(
        batch["index"], batch.get(REGULARIZATION, [False] * len(batch["index"])), strict=True)}  # fmt: skip
    assert all(mark == (rows[row]["hf_bucketing_source"] == 1) for row, mark in marks.items())
    stream = PreparedStream.load(tmp_path / "stream")
    streamed = [*stream.open(packed=False)]
    assert Counter(bool(row.get(REGULARIZATION)) for row in streamed) == {True: len(rows) / 2, False: len(rows) / 2}
    (tmp_path / "data.toml").write_text(
        f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{media_dir}"\nis_reg = true\n'
    )
    listed = load_toml(tmp_path / "data.toml")
    assert listed.sources[0]["is_regularization"] is True
    assert not any("is_reg" in sentence for sentence in listed.ignored)
    texts, source = (
        Dataset.from_dict({REGULARIZATION: ["no"]}),
        SourceConfig(dataset="x", table=TableConfig(buckets="64,64")),
    )
    with pytest.raises(ColumnError, match="must hold true or false"):
        with_marks(texts, source, say=print)


@pytest.mark.every
def test_processes_preserve_their_own_samples(pipeline_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    flags = ("--lora_rank", 2, "--preservation", "prior", "--preservation_share", 0.4, "--max_train_steps", 4)
    flags += ("--train_batch_size", 1, "--gradient_accumulation_steps", 4, "--learning_rate", 0)
    launch_run(pipeline_dir, prepared_dir, tmp_path / "out", *flags, num_processes=2)
    config, together = PreservationConfig(preservation="prior", preservation_share=0.4), set()
    for lines in zip(*read_sample_logs(tmp_path / "out"), strict=True):
        keys = [(0, line["epoch"], line["index"][0]) for line in lines]
        preserved = [target is not None for target in base_targets(config, {}, keys)]
        assert [line["loss"] == [0.0] for line in lines] == preserved, "adapters begin as the base model"
        together.add(sum(preserved))
    assert 1 in together, "one process asks the base model, and the other does not"
