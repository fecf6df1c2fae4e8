"""Pipelines of two transformers, as Wan 2.2 A14B: each is trained at its noise levels, alone or both in one run."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from safetensors.torch import load_file

from hf_bucketing import BucketingError
from hf_bucketing.adapters.files import COMFYUI_WEIGHTS, LORA_WEIGHTS, PEFT_FILES
from hf_bucketing.adapters.kinds import adapters_of as adapters_in
from hf_bucketing.adapters.loading import expert_folder, loading_options
from hf_bucketing.adapters.lora import add_lora, check_component, save_lora, start_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.batching.steps import Step
from hf_bucketing.batching.ways import make_experts
from hf_bucketing.models.experts import TrainedComponent, transformers_of
from hf_bucketing.models.families.wan import WanRecipe
from hf_bucketing.models.objectives import FlowMatching
from hf_bucketing.report import render_page
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.page import run_page
from hf_bucketing.runs.review import losses_of, review_experts, review_run
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.synthetic.media import Clip, make_media_dataset
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.trained import TrainedModel
from tests.conftest import run_script_here
from tests.training.test_kinds_and_optimizers import check_resume
from tests.training.training_cases import (
    BATCHING,
    STABLE,
    count_samples,
    in_process,
    run,
    run_card,
    train,
    train_until,
)

OPTIONS = {"weighting_scheme": None, "snr_gamma": None, "seed": 0}
EXPERTS = ("transformer", "transformer_2")
BOUNDARY = 0.875
BOTH = {"trained_component": "both"}
LORA = {**BOTH, "lora_rank": 2, "lora_alpha": 4}
PACK = {"batching": "pack", "max_tokens": 640, "strip_length": 16}


@pytest.fixture(scope="module")
def expert_dir(pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline = WanPipeline.from_pretrained(pipeline_dir)
    torch.manual_seed(1)
    second = type(pipeline.transformer).from_config(pipeline.transformer.config)
    components = {**pipeline.components, "transformer_2": second}
    path = tmp_path_factory.mktemp("experts") / "wan"
    WanPipeline(**components, boundary_ratio=BOUNDARY).save_pretrained(path)
    return path


def weights(pipeline: DiffusionPipeline, name: str) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in getattr(pipeline, name).parameters()])


def test_each_transformer_is_trained_at_the_noise_levels_that_the_pipeline_calls_it_at(expert_dir: Path) -> None:
    called: dict[str, list[float]] = {name: [] for name in EXPERTS}
    pipeline = WanPipeline.from_pretrained(expert_dir)
    for name in EXPERTS:
        getattr(pipeline, name).register_forward_pre_hook(
            lambda module, args, kwargs, name=name: called[name].append(float(kwargs["timestep"][0])), with_kwargs=True
        )
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        "red", height=32, width=32, num_frames=5, num_inference_steps=20, guidance_scale=1.0, output_type="latent"
    )
    latents = [torch.zeros(1, 1, 1, 1)] * 500
    whole = FlowMatching(shift=3.0)(latents, indices=range(500), epoch=0).timesteps
    for name in EXPERTS:
        recipe = WanRecipe.load(str(expert_dir), trained=name)
        low, high = (1000 * level for level in recipe.sigmas())
        assert called[name]
        assert low <= min(called[name]) <= max(called[name]) <= high
        drawn = recipe.objective(**OPTIONS)(latents, indices=range(500), epoch=0).timesteps
        assert low <= float(drawn.min()) < float(drawn.max()) <= high
        inside = (whole >= low) & (whole <= high)
        assert torch.equal(drawn[inside], whole[inside]), "only others are drawn anew"
        trained = {
            part for part in EXPERTS if any(p.requires_grad for p in getattr(recipe.pipeline, part).parameters())
        }
        assert trained == {name}


@pytest.mark.parametrize(
    "batching",
    [pytest.param({}, marks=pytest.mark.slow), {"batching": "pack", "max_tokens": 640, "strip_length": 16}],
    ids=["bucket", "pack"],
)
def test_a_run_changes_the_second_transformer_alone(batching, expert_dir, prepared_dir, tmp_path: Path) -> None:
    validation = {"validation_prompts": ["red"], "validation_sizes": "5,32,48", "validation_steps": 1,
                  "validation_inference_steps": 10}  # fmt: skip
    run(in_process(expert_dir, prepared_dir, tmp_path, trained_component="transformer_2", max_train_steps=1,
                   **validation, **batching))  # fmt: skip
    before, after = (DiffusionPipeline.from_pretrained(path) for path in (expert_dir, tmp_path))
    assert after.config.boundary_ratio == BOUNDARY
    assert torch.equal(weights(before, "transformer"), weights(after, "transformer"))
    assert not torch.equal(weights(before, "transformer_2"), weights(after, "transformer_2"))
    assert len(list((tmp_path / "validation" / "step-1").glob("*.mp4"))) == 1


def test_adapters_of_the_second_transformer_load_into_it(expert_dir, prepared_dir, tmp_path: Path) -> None:
    run(in_process(expert_dir, prepared_dir, tmp_path, trained_component="transformer_2", lora_rank=2,
                   max_train_steps=2))  # fmt: skip
    pipeline = WanPipeline.from_pretrained(expert_dir)
    pipeline.load_lora_weights(str(tmp_path), load_into_transformer_2=True)
    adapted = {name for name in EXPERTS if getattr(getattr(pipeline, name), "peft_config", {})}
    assert adapted == {"transformer_2"}


def test_adapters_of_another_transformer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "training_config.json").write_text('{"trained_component": "transformer_2"}')
    (tmp_path / "checkpoint-3").mkdir()
    for path in (tmp_path, tmp_path / "pytorch_lora_weights.safetensors", tmp_path / "checkpoint-3"):
        config = AdapterConfig(lora_rank=2, init_from_adapters=str(path))
        with pytest.raises(BucketingError, match=r"holds adapters of transformer_2, .* this run trains transformer;"):
            start_adapters(None, config, component="transformer")
        check_component(str(path), component="transformer_2")


def test_a_pipeline_without_a_second_transformer_and_levels_that_do_not_rise_are_refused(pipeline_dir: Path) -> None:
    with pytest.raises(BucketingError, match="has no transformer_2 to train"):
        WanRecipe.load(str(pipeline_dir), trained="transformer_2")
    with pytest.raises(BucketingError, match="from 0 to 1"):
        FlowMatching(sigmas=(0.5, 0.5))


def adapters_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(folder / name / LORA_WEIGHTS) for name in EXPERTS}


def load_both(pipeline: Any, folder: Path) -> None:
    """Load the adapters of both experts as the card of a run says."""
    for options in loading_options("both"):
        pipeline.load_lora_weights(str(folder), **options)


def experts_in(folder: Path) -> list[str]:
    """Return the expert of each optimizer step."""
    return [line["expert"] for line in read_log(folder, "losses")]


@pytest.mark.cases(fast=("settings0",), slow=("*",))
@pytest.mark.parametrize("settings", [{}, {"shift": "resolution"}, {"weighting_scheme": "uniform", "shift": 5.0}])
def test_experts_take_turns_evenly_as_often_as_their_noise_levels_are_drawn(
    settings: dict, expert_dir: Path, tmp_path: Path
) -> None:
    recipe = WanRecipe.load(str(expert_dir), trained="both")
    experts = make_experts(in_process(expert_dir, tmp_path, tmp_path, **BOTH, **settings), recipe)
    assert sum(experts.shares) == pytest.approx(1)
    size = recipe.spec.latent_size((81, 480, 832))
    whole = FlowMatching(
        shift=5.0 if settings.get("shift") == 5.0 else 3.0,
        weighting_scheme=settings.get("weighting_scheme", "logit_normal"),
    )
    drawn = whole([torch.zeros(1, *size)[:, :1, :1, :1]] * 4000, indices=range(4000), epoch=0).timesteps / 1000
    assert float((drawn >= BOUNDARY).double().mean()) == pytest.approx(experts.shares[0], abs=0.03)
    turns = [experts.at(number).recipe.trained for number in range(1000)]
    assert turns == [experts.at(number).recipe.trained for number in range(1000)]
    for share, name in zip(experts.shares, EXPERTS, strict=True):
        counts = np.cumsum([turn == name for turn in turns])
        assert np.abs(counts - share * np.arange(1, 1001)).max() < 1, "at no step is an expert ahead by a whole step"
        high, low = (step.objective.sigmas for step in experts.steps)
        assert (low, high) == ((0.0, BOUNDARY), (BOUNDARY, 1.0))


@pytest.mark.cases(slow=("pack",))
@pytest.mark.parametrize("batching", [{"train_batch_size": 2}, PACK], ids=["bucket", "pack"])
def test_a_run_trains_both_experts_and_every_sample_once_per_epoch(
    batching: dict, expert_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {"max_train_steps": None, "num_train_epochs": 2, "gradient_accumulation_steps": 2, "ema_decay": 0.5,
                "validation_split": 0.2, "validation_loss_steps": 4, "validation_noise_levels": 4,
                "validation_prompts": ["red"], "validation_sizes": "5,32,48", "validation_steps": 3,
                "validation_inference_steps": 10, **batching}  # fmt: skip
    trainer = Trainer(in_process(expert_dir, prepared_dir, tmp_path, **LORA, **settings))
    called = Counter[str]()
    for name, transformer in trainer.trained.transformers.items():
        transformer.patch_embedding.register_forward_hook(
            lambda model, *_, name=name: called.update([name] * model.training)
        )
    trainer.run()
    assert [(epoch.seen, epoch.repeated) for epoch in count_samples(tmp_path)] == [(16, 0)] * 2
    turns = experts_in(tmp_path)
    assert set(turns) == set(EXPERTS)
    assert turns == [trainer.experts.at(number).recipe.trained for number in range(len(turns))]
    batches = Counter()
    for line in read_log(tmp_path, "losses"):
        batches[line["expert"]] += line["busy_batches"]
        levels = [float(name.partition("/")[2]) for name in line if name.startswith("loss_by_noise/")]
        assert min(levels) >= 0.8 if line["expert"] == "transformer" else max(levels) <= 0.8
    assert called == batches
    entry = read_log(tmp_path, "validation")[-1]
    assert [level["noise_level"] > BOUNDARY for level in entry["by_noise"]] == [False, False, False, True]
    assert entry["by_noise"][-1]["quantiles"] == [pytest.approx(trainer.experts.shares[1]), pytest.approx(1)]
    logs = Logs(tmp_path)
    assert all(check.holds for check in review_run(logs, min_fall=-9).checks)
    assert len(review_experts(logs)) == 2
    assert "expert transformer_2" in render_page(run_page([tmp_path]))
    saved = adapters_of(tmp_path)
    assert saved["transformer"].keys() == saved["transformer_2"].keys()
    assert not any(torch.equal(value, saved["transformer_2"][name]) for name, value in saved["transformer"].items())
    card = (tmp_path / "README.md").read_text()
    assert f"`transformer/{COMFYUI_WEIGHTS}` and `transformer_2/{COMFYUI_WEIGHTS}`, each under a name" in card
    for name, second in zip(EXPERTS, ("", ", load_into_transformer_2=True"), strict=True):
        assert f'"{tmp_path.name}", subfolder="{name}", weight_name="{LORA_WEIGHTS}"{second})' in card
    assert len(list((tmp_path / "validation" / "step-3").glob("*.mp4"))) == 1


def render(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline("red", height=32, width=48, num_frames=5, num_inference_steps=10, guidance_scale=1.0,
                    generator=torch.Generator().manual_seed(0), output_type="pt").frames  # fmt: skip


@pytest.mark.slow
def test_what_is_rendered_while_training_is_what_the_stock_pipeline_renders_with_both_files(
    expert_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    trainer = Trainer(in_process(expert_dir, prepared_dir, tmp_path, **LORA, offload_idle_expert=True))
    pipeline, found = trainer.recipe.pipeline, []
    save = trainer.trained.save
    trainer.trained.save = lambda *args, **options: (found.append(render(pipeline)), save(*args, **options))
    trainer.run()
    stock = WanPipeline.from_pretrained(expert_dir)
    load_both(stock, tmp_path)
    torch.testing.assert_close(render(stock), found[0], rtol=0, atol=1e-5)
    flags = ("--trained_component", "both", "--prompt", "red", "--height", 32, "--width", 48, "--num_frames", 5)
    clip = tmp_path / "clip.mp4"
    run_script_here("sample_video.py", expert_dir, "--lora_weights", tmp_path, *flags, "--output", clip)
    assert clip.is_file()


def test_the_averages_of_an_expert_follow_its_own_steps_alone(expert_dir, prepared_dir, tmp_path: Path) -> None:
    settings = {**LORA, "ema_decay": 0.2, "weighting_scheme": "uniform", "shift": 5.0, "max_train_steps": 7}
    trainer = Trainer(in_process(expert_dir, prepared_dir, tmp_path, **settings))
    trained = trainer.trained
    steps, averages = Counter[str](), {name: [value.clone() for value in trained.weights[name]] for name in EXPERTS}
    update = trained.update

    def updated(name: str, **options: bool) -> None:
        update(name, **options)
        decay = min(0.2, (1 + steps[name]) / (10 + steps[name])) if steps[name] else 0.0
        averages[name] = [
            decay * average + (1 - decay) * weight.detach()
            for average, weight in zip(averages[name], trained.weights[name], strict=True)
        ]
        steps[name] += 1

    trained.update = updated
    trainer.run()
    assert steps == Counter(experts_in(tmp_path))
    assert min(steps.values()) > 2
    for name in EXPERTS:
        assert trained.ema[name].optimization_step == steps[name]
        for value, by_hand in zip(trained.ema[name].shadow_params, averages[name], strict=True):
            torch.testing.assert_close(value, by_hand, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("component", ["transformer", "transformer_2", "both"])
def test_the_script_renders_the_same_from_a_folder_that_has_only_files_for_comfyui(
    component: TrainedComponent, expert_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()  # the main process writes
    pipeline = WanPipeline.from_pretrained(expert_dir)
    torch.manual_seed(0)
    for name in transformers_of(component):
        add_lora(pipeline, AdapterConfig(lora_rank=2, lora_alpha=6), component=name)
        for value in adapters_in(getattr(pipeline, name)).values():
            torch.nn.init.normal_(value, std=0.2)
        for lora_format in ("diffusers", "comfyui"):
            folder = tmp_path / lora_format / expert_folder(name, trained=component)
            save_lora(pipeline, folder, component=name, lora_format=lora_format)
    frames, call = [], WanPipeline.__call__

    @functools.wraps(call)
    def noted(self: WanPipeline, *args: Any, **options: Any) -> Any:
        result = call(self, *args, **options)
        frames.append(torch.from_numpy(result.frames))
        return result

    monkeypatch.setattr(WanPipeline, "__call__", noted)
    common = (expert_dir, "--prompt", "red", "--height", 32, "--width", 48, "--num_frames", 5)
    common += ("--num_inference_steps", 10, "--output", tmp_path / "clip.mp4")
    run_script_here("sample_video.py", *common)
    for lora_format in ("diffusers", "comfyui"):
        folder = tmp_path / lora_format
        run_script_here("sample_video.py", *common, "--lora_weights", folder, "--trained_component", component)
    plain, expected, found = frames
    assert float((expected - plain).abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.cases(slow=("settings0",))
@pytest.mark.parametrize("settings", [{"ema_decay": 0.9}, PACK])
def test_a_resumed_run_is_the_uninterrupted_one(settings: dict, expert_dir, prepared_dir, tmp_path: Path) -> None:
    settings = {**LORA, **settings, "gradient_accumulation_steps": 2, "max_train_steps": 5, "checkpointing_steps": 2}
    run(in_process(expert_dir, prepared_dir, tmp_path, **settings))
    whole, losses, turns = adapters_of(tmp_path), losses_of(tmp_path), experts_in(tmp_path)
    run(in_process(expert_dir, prepared_dir, tmp_path, **settings, resume_from_checkpoint="checkpoint-2"))
    assert (losses_of(tmp_path), experts_in(tmp_path)) == (losses, turns)
    for name, weights_of in adapters_of(tmp_path).items():
        assert all(torch.equal(value, whole[name][key]) for key, value in weights_of.items())
    assert set(adapters_of(tmp_path / "checkpoint-4")) == set(EXPERTS)


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes_exactly(expert_dir, prepared_dir, tmp_path: Path) -> None:
    common = [*BATCHING["bucket"], "--trained_component", "both", "--lora_rank", 2, "--max_train_steps", 5]
    common += ["--gradient_accumulation_steps", 2, "--checkpointing_steps", 1, "--checkpoints_total_limit", 1]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(expert_dir, prepared_dir, whole, *common, num_processes=2)
    log = parts / "logs" / "losses.jsonl"
    train_until(
        lambda: log.exists() and log.read_text().count("\n") >= 2 and any(parts.glob("checkpoint-*")),
        *(expert_dir, prepared_dir, parts, *common),
        num_processes=2,
    )
    train(expert_dir, prepared_dir, parts, *common, "--resume_from_checkpoint", "latest", num_processes=2)
    assert losses_of(parts) == pytest.approx(losses_of(whole), abs=1e-6)
    assert experts_in(parts) == experts_in(whole)
    for process in range(2):
        name = f"logs/samples-{process}.jsonl"
        assert (parts / name).read_text() == (whole / name).read_text()
    for name, saved in adapters_of(whole).items():
        for key, value in saved.items():
            torch.testing.assert_close(adapters_of(parts)[name][key], value, rtol=1e-4, atol=1e-6)


COMBINED: dict[str, dict[str, Any]] = {
    "preservation": {"preservation": "prior", "preservation_share": 0.5, "slider": ["red|blue"]},
    "dora": {"adapter": "dora", "ema_decay": 0.5},
    "loha": {"adapter": "loha"},
    "lokr": {"adapter": "lokr", "offload_idle_expert": True},
    "comfyui": {"lora_format": "comfyui"},
    "schedule-free": {"optimizer": "schedulefree:AdamWScheduleFree", "optimizer_args": ["warmup_steps=2"]},
}


@pytest.mark.every
@pytest.mark.parametrize("combined", COMBINED)
def test_what_both_experts_combine_with_resumes_exactly_and_is_what_a_stock_pipeline_renders(
    combined: str, expert_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if combined == "schedule-free":
        pytest.importorskip("schedulefree")
    rendered, save = [], TrainedModel.save

    def rendering(self: TrainedModel, *args: Any, **options: Any) -> None:
        with self.averages():
            rendered.append(render(self.recipe.pipeline))
        save(self, *args, **options)

    monkeypatch.setattr(TrainedModel, "save", rendering)
    folder = check_resume(expert_dir, prepared_dir, tmp_path, **LORA, **COMBINED[combined])
    assert torch.equal(*rendered)
    assert set(experts_in(folder)) == set(EXPERTS)
    assert [(epoch.seen, epoch.repeated) for epoch in count_samples(folder)] == [(20, 0)] * 2
    kinds = {"dora": [LORA_WEIGHTS], "loha": PEFT_FILES, "lokr": PEFT_FILES, "comfyui": [COMFYUI_WEIGHTS]}
    for name in EXPERTS:
        files = {file.name for file in (folder / name).iterdir()}
        assert files == set(kinds.get(combined, [LORA_WEIGHTS, COMFYUI_WEIGHTS]))
    (tmp_path / expert_dir.name).symlink_to(expert_dir)
    monkeypatch.chdir(tmp_path)
    found = render(run_card(folder, dtype="float32")["pipeline"])
    assert float((found - render(WanPipeline.from_pretrained(expert_dir))).abs().max()) > 1e-3
    torch.testing.assert_close(found, rendered[0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "offload_blocks": 2}])
def test_an_expert_that_waits_on_the_cpu_learns_the_same(
    settings: dict, expert_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    losses = []
    for name, waits in (("stays", False), ("waits", True)):
        folder = tmp_path / name
        config = in_process(expert_dir, prepared_dir, folder, **LORA, **STABLE, **settings, offload_idle_expert=waits)
        losses.append(run(config))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    stays, waits = (adapters_of(tmp_path / name) for name in ("stays", "waits"))
    for name in EXPERTS:
        for key, value in stays[name].items():
            torch.testing.assert_close(waits[name][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_both_experts_train_on_quantised_weights(expert_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    settings = {**LORA, "quantize_base": "int8", "gradient_checkpointing": True, "max_train_steps": 3}
    stays = run(in_process(expert_dir, prepared_dir, tmp_path / "stays", **settings))
    waits = run(in_process(expert_dir, prepared_dir, tmp_path / "waits", **settings, offload_idle_expert=True))
    assert waits == pytest.approx(stays, rel=1e-5)


@pytest.mark.slow
def test_whole_experts_are_saved_as_one_pipeline(expert_dir: Path, prepared_dir: Path, tmp_path: Path) -> None:
    run(in_process(expert_dir, prepared_dir, tmp_path, **BOTH, max_train_steps=4, ema_decay=0.5))
    assert set(experts_in(tmp_path)) == set(EXPERTS)
    before, after = (DiffusionPipeline.from_pretrained(path) for path in (expert_dir, tmp_path))
    for name in EXPERTS:
        assert not torch.equal(weights(before, name), weights(after, name))


@pytest.mark.slow
def test_the_held_out_loss_of_both_experts_is_that_of_each_at_its_noise_levels(
    expert_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    def computed(name: str, levels: int) -> dict[str, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        settings = {"trained_component": name, "validation_split": 0.2, "validation_noise_levels": levels}
        trainer = Trainer(in_process(expert_dir, prepared_dir, tmp_path / name, **settings))
        trained = trainer.trained
        entry = trainer.evaluation.held_out.compute(trainer.experts, trained.for_evaluation, trained.accelerator)
        shares = trainer.experts.shares
        trainer.release()
        return {**entry, "shares": shares}

    both = computed("both", 6)
    high, low = (computed(name, levels) for name, levels in zip(EXPERTS, (1, 5), strict=True))
    assert [level["loss"] for level in both["by_noise"]] == [
        level["loss"] for level in (*low["by_noise"], *high["by_noise"])
    ]
    share = both["shares"][0]
    mean = share * high["validation_loss"] + (1 - share) * low["validation_loss"]
    assert both["validation_loss"] == pytest.approx(mean)
    assert both["samples"] == low["samples"] == high["samples"]
    for bucket, part, other in zip(both["by_bucket"], high["by_bucket"], low["by_bucket"], strict=True):
        assert bucket["loss"] == pytest.approx(share * part["loss"] + (1 - share) * other["loss"])


@pytest.mark.slow
def test_adapters_of_both_experts_are_where_the_next_run_begins(expert_dir, prepared_dir, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run(in_process(expert_dir, prepared_dir, first, **LORA))
    start = {"learning_rate": 0.0, "init_from_adapters": str(first), "max_train_steps": 1}
    run(in_process(expert_dir, prepared_dir, second, **LORA, **start))
    for name, saved in adapters_of(first).items():
        assert all(torch.equal(value, adapters_of(second)[name][key]) for key, value in saved.items())
    alone = {"trained_component": "transformer_2", "lora_rank": 2, "max_train_steps": 1}
    with pytest.raises(BucketingError, match="holds adapters of both,"):
        run(in_process(expert_dir, prepared_dir, third, **alone, init_from_adapters=str(first)))
    config = in_process(expert_dir, prepared_dir, third, **alone, init_from_adapters=str(first / "transformer_2"),
                        learning_rate=0.0)  # fmt: skip
    run(config)
    saved = load_file(third / LORA_WEIGHTS)
    assert all(torch.equal(value, saved[key]) for key, value in adapters_of(first)["transformer_2"].items())


@pytest.mark.every
def test_max_tokens_that_fit_are_found_for_both_experts(
    expert_dir, prepared_dir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**LORA, "batching": "pack", "max_tokens": "auto", "strip_length": 16, "max_train_steps": 2}
    tried = Counter[str]()
    call = Step.__call__

    def noted(self: Step, *args: Any, **options: Any) -> Any:
        tried[self.recipe.trained] += 1
        return call(self, *args, **options)

    monkeypatch.setattr(Step, "__call__", noted)
    trainer = Trainer(in_process(expert_dir, prepared_dir, tmp_path, **settings))
    assert isinstance(trainer.config.batches.max_tokens, int)
    assert tried == dict.fromkeys(EXPERTS, 1)
    trainer.release()


@pytest.mark.slow
def test_both_experts_of_image_to_video_are_trained(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    pipeline, prepared = tiny_folder("wan-2.2-i2v"), tmp_path / "prepared"
    make_media_dataset(tmp_path / "videos", num_samples=6, clips=(Clip(9, 64, 96, 8), Clip(5, 96, 64, 8)))
    run_script_here(
        "prepare_dataset.py",
        dataset=tmp_path / "videos",
        pretrained_model_name_or_path=pipeline,
        output_dir=prepared,
        target_fps=8,
        bucket_frames="5,9",
        buckets="64,96;96,64",
    )
    out = tmp_path / "out"
    run(in_process(pipeline, prepared, out, **LORA, max_train_steps=6, offload_idle_expert=True))
    assert set(experts_in(out)) == set(EXPERTS)
    stock = WanImageToVideoPipeline.from_pretrained(pipeline)
    load_both(stock, out)
    assert all(getattr(stock, name).peft_config for name in EXPERTS)


def test_experts_without_noise_levels_of_their_own_are_refused(expert_dir, prepared_dir, tmp_path: Path) -> None:
    base = tmp_path / "base"
    pipeline = WanPipeline.from_pretrained(expert_dir)
    pipeline.register_to_config(boundary_ratio=None)
    pipeline.save_pretrained(base)
    assert json.loads((base / "model_index.json").read_text())["boundary_ratio"] is None
    with pytest.raises(BucketingError, match="no `boundary_ratio`; train one of them"):
        Trainer(in_process(base, prepared_dir, tmp_path / "out", **LORA))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**BOTH, "offload_idle_expert": True}, "needs frozen weights"),
        ({"lora_rank": 2, "offload_idle_expert": True}, 'needs `trained_component="both"`'),
        ({**LORA, "offload_idle_expert": True, "quantize_base": "nf4"}, "needs a GPU"),
    ],
)
def test_an_expert_that_cannot_wait_is_refused(
    settings: dict, message: str, expert_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(BucketingError, match=message):
        Trainer(in_process(expert_dir, prepared_dir, tmp_path, **settings))
