"""Processes that share the tokens of their samples compute what one process computes, and draw the same samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, DynamoBackend
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from hf_bucketing import BucketingError
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import UNPACKABLE, families, family_of
from hf_bucketing.placement.context_parallel import check_model, fill_up_text, form_groups
from hf_bucketing.runs.logs import Logs
from hf_bucketing.runs.review import losses_of
from hf_bucketing.runs.run_log import RunLog
from hf_bucketing.training import TrainingConfig
from hf_bucketing.training.loop import Trainer
from hf_bucketing.training.opened import check_settings, open_run
from hf_bucketing.training.step_metrics import StepMetrics
from tests.conftest import ROOT, as_flags, launch_flags, run_script_here
from tests.models.cases import assert_same_gradients
from tests.models.families import CASES as FAMILIES
from tests.placement.context_parallel_worker import CASES
from tests.placement.test_sharding import RENDER, RENDERED, SHARDED_STATE, STABLE, about, train_all
from tests.processes import launch_forked
from tests.training.training_cases import count_samples, in_process, run, train

PACKS = {"batching": "pack", "max_tokens": 640, "strip_length": 16}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run context_parallel_worker.py in two processes, once for all cases."""
    folder = tmp_path_factory.mktemp("context_parallel")
    command = ["-m", "tests.placement.context_parallel_worker", folder]
    launch_forked(launch_flags(2), command, num_processes=2, env={"ACCELERATE_USE_CPU": "true"}, cwd=ROOT)
    return {case: torch.load(folder / f"{case}.pt") for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_that_share_their_samples_have_outputs_and_gradients_of_one(
    case: str, results: dict[str, Any]
) -> None:
    alone, together = results[case]["alone"], results[case]["together"]
    assert together["tokens"] == math.ceil(alone["tokens"] / 2)
    assert alone["output"].abs().max() > 1
    torch.testing.assert_close(together["output"], alone["output"], rtol=0, atol=1e-11)
    family, _ = CASES[case]
    without_gradient = FAMILIES[family].without_gradient
    if "lora" in case or "audio" in case:
        without_gradient = ()
    assert_same_gradients(alone["gradients"], together["gradients"], 1e-6, without_gradient=without_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_process_runs_the_model_alone_where_context_parallelism_is_taken_off(
    case: str, results: dict[str, Any]
) -> None:
    output = results[case]["alone"]["output"]
    torch.testing.assert_close(results[case]["together"]["removed"], output, rtol=0, atol=1e-11)
    torch.testing.assert_close(results[case]["together"]["again"], output, rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def even_dir(media_dir: Path, pipeline_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The media, prepared with sizes of even numbers of tokens."""
    folder = tmp_path_factory.mktemp("even") / "prepared"
    run_script_here(
        "prepare_dataset.py",
        dataset=media_dir,
        pretrained_model_name_or_path=pipeline_dir,
        output_dir=folder,
        target_fps=8,
        bucket_frames="1,9,17",
        buckets="64,64;64,96;96,64",
    )
    return folder


@pytest.mark.every
def test_a_run_on_stacks_has_the_losses_and_the_samples_of_one_process(
    pipeline_dir: Path, even_dir: Path, tmp_path: Path
) -> None:
    settings = {
        "lora_rank": 2,
        "ema_decay": 0.9,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "caption_dropout": 0.3,
        "flip_probability": 0.5,
        "random_crop": True,
        "train_batch_size": 2,
        "validation_prompts": ["red"],
        "validation_sizes": "9,64,64",
        "validation_steps": 2,
        "validation_inference_steps": 1,
        "max_train_steps": 4,
        "validation_split": 0.15,
    }
    one, two = tmp_path / "one", tmp_path / "two"
    expected = run(in_process(pipeline_dir, even_dir, one, **settings))
    train(pipeline_dir, even_dir, two, *as_flags(**settings), "--context_parallel_degree", 2)
    assert losses_of(two) == pytest.approx(expected, rel=1e-5)
    assert without_losses(two) == without_losses(one)
    assert count_samples(two) == count_samples(one)
    assert_same_held_out_losses(one, two)
    weights = [load_file(folder / "pytorch_lora_weights.safetensors") for folder in (one, two)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-3)  # AdamW's first steps amplify rounding
    assert len(list((two / "validation").rglob("*.mp4"))) == 2


@pytest.mark.cases(slow=("ltx-i2v-9",))
@pytest.mark.parametrize(("family", "frames"), [("ltx-i2v", 9), ("wan-2.2-ti2v", 9), ("qwen-image", 1)])
def test_a_run_of_tokens_with_timesteps_or_beside_text_has_the_losses_of_one_process(
    family: str, frames: int, media_dir: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, prepared = tiny_folder(family), tmp_path / "prepared"
    run_script_here(
        "prepare_dataset.py",
        dataset=media_dir,
        pretrained_model_name_or_path=pipeline,
        output_dir=prepared,
        target_fps=8,
        bucket_frames=frames,
        buckets="64,64;64,128",
    )
    settings = {**PACKS, "max_tokens": 1280, "max_train_steps": 2, "lora_rank": 2}
    expected = run(in_process(pipeline, prepared, tmp_path / "one", **settings))
    train(pipeline, prepared, tmp_path / "two", *as_flags(**settings), "--context_parallel_degree", 2)
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_on_packs_resumes_with_the_losses_of_one_process(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**PACKS, "checkpointing_steps": 1, "max_train_steps": 2, "validation_split": 0.15}
    one, two = tmp_path / "one", tmp_path / "two"
    expected = run(in_process(pipeline_dir, prepared_dir, one, **settings))
    shared = (*as_flags(**settings), "--context_parallel_degree", 2)
    train(pipeline_dir, prepared_dir, two, *shared)
    assert losses_of(two) == pytest.approx(expected, rel=1e-5)
    assert_same_held_out_losses(one, two)
    resumed = train(pipeline_dir, prepared_dir, two, *shared, "--resume_from_checkpoint", "checkpoint-1")
    assert "Resumed after optimizer step 1" in resumed.stderr
    assert losses_of(two) == pytest.approx(expected, rel=1e-5)
    assert without_losses(two) == without_losses(one)
    DiffusionPipeline.from_pretrained(two)


@pytest.mark.every
def test_a_killed_and_resumed_run_with_sharded_weights_has_the_losses_of_one_process(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path
) -> None:
    settings = {**PACKS, **STABLE, "lora_rank": 2, "checkpointing_steps": 2, "max_train_steps": 4}
    shared = {**settings, **RENDER, "context_parallel_degree": 2}
    train_all({"two": (SHARDED_STATE, 3, shared)}, tmp_path, pipeline_dir, prepared_dir, num_processes=2)
    expected = run(in_process(pipeline_dir, prepared_dir, tmp_path / "one", **settings))
    found = about(tmp_path / "two")
    assert (found["type"], found["shares"]) == ("FSDP", pytest.approx([0.5, 0.5], abs=0.01))
    assert losses_of(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    assert without_losses(tmp_path / "two") == without_losses(tmp_path / "one")
    assert (tmp_path / "two" / RENDERED.format(4)).is_file()


def assert_same_held_out_losses(one: Path, two: Path) -> None:
    expected, found = Logs(one).held_out[-1], Logs(two).held_out[-1]
    assert found["samples"] == expected["samples"] == 3
    assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)


def without_losses(output: Path) -> list[dict[str, Any]]:
    """Return the only log of samples of a run, without the losses."""
    (log,) = sorted((output / "logs").glob("samples-*.jsonl"))
    return [{**json.loads(line), "loss": None} for line in log.read_text().splitlines()]


@pytest.fixture
def four_processes() -> Iterator[SimpleNamespace]:
    """An accelerator of four processes, of which only the first exists."""
    PartialState(cpu=True)  # made later, it would take this process for one of four with GPUs
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield SimpleNamespace(num_processes=4, device=torch.device("cpu"), state=SimpleNamespace(device_mesh=None))
    distributed.destroy_process_group()


def test_processes_of_a_group_draw_the_same_batches_and_groups_different_ones(four_processes) -> None:
    form_groups(four_processes, degree=2)
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7]])
    drawn = [
        [
            batch.tolist()
            for batch in prepare_data_loader(
                loader, num_processes=4, process_index=process, torch_device_mesh=four_processes.state.device_mesh
            )
        ]
        for process in range(4)
    ]
    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert drawn == [first, first, second, second]


def test_without_context_parallelism_accelerate_gets_no_mesh(four_processes) -> None:
    form_groups(four_processes, degree=1)
    assert four_processes.state.device_mesh is None


def test_only_the_first_process_of_a_group_logs_its_samples(tmp_path: Path) -> None:
    for process in range(4):
        log = RunLog(tmp_path, process_index=process, num_processes=4, degree=2)
        log.write_samples(epoch=0, step=0, bucket_id=1, index=[process], loss=[0.5])
        assert log.state_dict()["samples"] == 1
        log.close()
    (count,) = count_samples(tmp_path)
    assert (count.seen, count.repeated, count.steps) == (2, 0, (1, 1))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "losses.jsonl",
        "plans.jsonl",
        "samples-0.jsonl",
        "samples-1.jsonl",
    ]


def test_the_metrics_of_a_step_count_each_group_once() -> None:
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda mine: torch.cat([mine, mine, 3 * mine, 3 * mine])
    )
    metrics = StepMetrics(accelerator, max_tokens=100, degree=2)
    half = torch.tensor([0.5])
    metrics.add(torch.tensor([2.0]), half, weights=half, tokens=np.array([40]), cost=1.0)
    values, _ = metrics.finish(seconds=lambda: 0.0).read()
    assert (values["train_loss"], values["samples"], values["tokens"]) == (4.0, 4, 160)
    assert (values["imbalance"], values["fill"]) == (1.5, 0.4)


REFUSED = {
    "processes": ({"processes": 3}, "number of processes that it divides, got 3; launch 2 or a multiple"),
    "DeepSpeed": ({"kind": DistributedType.DEEPSPEED}, "or use DDP or version 2 of FSDP .* under DEEPSPEED"),
    "FSDP 1": ({"kind": DistributedType.FSDP}, "or use DDP or version 2 of FSDP .* under FSDP"),
    "mesh": ({"mesh": "hybrid"}, "omit accelerate's parallelism_config"),
    "faults": ({"on_error": "replace"}, "needs `on_error=.raise.`"),
    "family": ({"family": "latte"}, "Omit .*: there is no plan .* of a LatteTransformer3DModel"),
    "heads": ({"processes": 6, "context_parallel_degree": 3}, "divide the 4 attention heads .* one of .2, 4."),
    "auto": ({"max_tokens": "auto"}, "needs `max_tokens` as a number"),
    "strips": ({**PACKS, "strip_length": 15}, "`strip_length=15` tokens into unequal parts; use `strip_length=16`"),
    "sizes": ({}, r"tokens of the sizes 25x112x48 \(147 tokens, \d samples\)\. Train packs .* widths that 32 divides"),
}


@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_context_parallelism_does_not_work_with_is_refused_before_weights_are_loaded(
    settings: dict[str, Any], reason: str, pipeline_dirs: dict[str, Path], prepared_dir: Path, tmp_path: Path
) -> None:
    chosen = {"context_parallel_degree": 2, "processes": 2, "kind": DistributedType.MULTI_CPU, "family": "wan"}
    chosen.update({"mesh": None, **settings})
    processes, kind, family, mesh = (chosen.pop(name) for name in ("processes", "kind", "family", "mesh"))
    config = in_process(pipeline_dirs[family], prepared_dir, tmp_path, **chosen)
    with pytest.raises(BucketingError, match=reason):
        check(config, processes, kind, torch_device_mesh=mesh, is_fsdp2=False)
    works = {"context_parallel_degree": 2, **PACKS}
    config = in_process(pipeline_dirs["wan"], prepared_dir, tmp_path, **works)
    check(config, 4, DistributedType.FSDP, torch_device_mesh=None, is_fsdp2=True)


def test_every_family_with_a_plan_in_diffusers_is_compared_with_one_process() -> None:
    planned = {name for name in families() if getattr(diffusers, name)._cp_plan is not None}
    assert planned == {type(FAMILIES[family].model()).__name__ for family, _ in CASES.values()}


def test_every_transformer_with_a_plan_in_diffusers_is_taken_or_explained() -> None:
    transformers = [name for name in dir(diffusers) if re.fullmatch(r"\w+Transformer\w*Model", name)]
    planned = {name for name in transformers if getattr(getattr(diffusers, name), "_cp_plan", None) is not None}
    assert "WanTransformer3DModel" in planned
    assert {name for name in planned if name not in families()} <= UNPACKABLE.keys()
    text = (ROOT / "docs" / "many-gpus.md").read_text().partition("## Context parallelism")[2].partition("\n## ")[0]
    for name in planned & UNPACKABLE.keys():
        assert name.partition("Transformer")[0] in text, f"docs/many-gpus.md says why a {name} is not taken"


def test_packs_take_models_and_degrees_that_stacks_cannot_take() -> None:
    recipe = SimpleNamespace(family=family_of(FAMILIES["minimax-h3"].model()))
    check_model(3, recipe, {"num_attention_heads": 56}, packed=True)
    with pytest.raises(BucketingError, match=r"Train packs .* masks no part of its sequence of text and tokens"):
        check_model(2, recipe, {"num_attention_heads": 56}, packed=False)


def test_a_text_that_no_mask_can_fill_up_is_refused() -> None:
    flux, text = FAMILIES["flux"].model(), torch.zeros(1, 7, 16)
    with pytest.raises(BucketingError, match="does not divide the 7 text tokens, and a FluxTransformer2DModel masks"):
        fill_up_text(2, flux, (), {"encoder_hidden_states": text})
    assert fill_up_text(7, flux, (), {"encoder_hidden_states": text})[1]["encoder_hidden_states"] is text


def check(config: TrainingConfig, processes: int, kind: DistributedType, **others: Any) -> None:
    """Check the settings of a run on as many processes."""
    plugins = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(zero_stage=2),
        fsdp_plugin=SimpleNamespace(cpu_ram_efficient_loading=False, activation_checkpointing=False),
        dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO),
    )
    about = {"device": torch.device("cpu"), "mixed_precision": "no", "state": plugins, **others}
    accelerator = SimpleNamespace(num_processes=processes, distributed_type=kind, **about)
    check_settings(config, accelerator)
    open_run(config, accelerator)


def test_a_run_is_refused_before_its_weights_are_loaded(
    pipeline_dir: Path, prepared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recipe, "load", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    config = in_process(pipeline_dir, prepared_dir, tmp_path / "out", context_parallel_degree=2)
    with pytest.raises(BucketingError, match="needs a number of processes that it divides, got 1"):
        Trainer(config)
