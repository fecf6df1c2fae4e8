"""Gradient checkpointing of some blocks: which, what they save, and what stays the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from hf_bucketing import BucketingError, Size
from hf_bucketing.adapters import AdapterConfig
from hf_bucketing.placement import MemoryConfig
from hf_bucketing.placement.blocks import blocks_of, spread_blocks
from hf_bucketing.placement.settings import checkpointing
from hf_bucketing.planner.components import read_components
from hf_bucketing.planner.memory import MemoryParts, MemoryPlan, StepShape, fewest_checkpoints
from hf_bucketing.planner.trace import LAYERS, TracedStep, _traced, trace
from hf_bucketing.runs.run_log import read_log
from hf_bucketing.training import estimate
from hf_bucketing.training.loop import Trainer
from tests.placement.test_sharding import FSDP, PACKS, train_all
from tests.training.training_cases import in_process, run

PACKED = {"batching": "pack", "max_tokens": 640, "strip_length": 16}
LAYERS_OF_RUN = 5


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("No", False), ("1", True), ("0", False), ("2", 2), ("17", 17), ("auto", "auto")],
)
def test_a_flag_says_which_blocks(text: str, value: object) -> None:
    read = checkpointing(text)
    assert read == value
    assert type(read) is type(value)
    assert MemoryConfig(gradient_checkpointing=read).gradient_checkpointing is read


@pytest.mark.parametrize("value", ["some", -1, 1.5, None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(BucketingError, match="`gradient_checkpointing` must be true, false, a number"):
        MemoryConfig(gradient_checkpointing=value)  # type: ignore[arg-type]
    with pytest.raises(BucketingError, match="`gradient_checkpointing` must be true, false, a number"):
        checkpointing(str(value))


def test_more_blocks_than_a_model_has_are_refused() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(8))
    assert spread_blocks(model, 3) == [model.blocks[index] for index in (0, 2, 5)]
    with pytest.raises(BucketingError, match="gradient_checkpointing=9` is more than the 8 blocks"):
        spread_blocks(model, 9)


def deep(tiny_folder: Callable[[str], Path], name: str) -> TracedStep:
    """Return a step of a transformer of several blocks of each kind."""
    components = read_components(str(tiny_folder(name)))
    spec, recipe, given = components.spec, components.recipe, components.transformer
    config = given.config | {layers: 8 for layers in LAYERS if layers in given.config}
    size = spec.snap(Size(1 if recipe.family.images_only else 9, 96, 128))
    return TracedStep(
        transformer=dataclasses.replace(given, config_json=json.dumps(config, sort_keys=True)),
        latent_sizes=(spec.latent_size(size),) * 2,
        text_length=recipe.text_length(16),
    )


@pytest.mark.every
@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.every), 2])
@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(name, marks=pytest.mark.every) for name in ("wan", "hunyuan-video"))]
)
def test_some_blocks_are_planned_as_they_are_traced(name: str, lora: int | None, tiny_folder) -> None:
    step = dataclasses.replace(deep(tiny_folder, name), adapters=AdapterConfig(lora_rank=lora))
    layers = tuple((setting, 8) for setting in LAYERS if setting in step.transformer.config)
    blocks = 8 * len(layers)
    totals = []
    for count in (False, 2, blocks // 2, blocks - 1, True):
        some = dataclasses.replace(step, gradient_checkpointing=count)
        planned, traced = trace(some), _traced(some, layers)
        for phase, peak in traced.peaks.items():
            assert 0.98 < planned.peaks[phase].total / peak.total < 1.15
        assert planned.flops.hardware == pytest.approx(traced.flops.hardware, rel=0.02)
        assert planned.flops.forward + planned.flops.backward == pytest.approx(
            traced.flops.forward + traced.flops.backward
        )
        totals.append((planned.peaks["backward"].total, planned.flops.recomputed))
    peaks, recomputed = zip(*totals, strict=True)
    assert peaks[0] > peaks[1] > peaks[2] > peaks[3] >= peaks[4]
    assert list(recomputed) == sorted(recomputed)
    with pytest.raises(BucketingError, match=f"gradient_checkpointing={blocks + 1}` is more than the {blocks} blocks"):
        trace(dataclasses.replace(step, gradient_checkpointing=blocks + 1))


def test_as_few_blocks_as_fit_with_a_margin() -> None:
    def plan(count: bool | int) -> MemoryPlan:
        kept = 0 if count is True else 10 - int(count)
        shape = StepShape.of([Size(1, 16, 16)], tokens=1, text_tokens=0)
        return MemoryPlan(phases={"backward": MemoryParts(activations=100 + 10 * kept)}, shape=shape, blocks=10)

    fewest = [fewest_checkpoints(plan, blocks=10, memory=memory) for memory in (231, 200, 150, 116, 50)]
    assert fewest == [False, 3, 7, True, True]


@pytest.fixture
def deep_pipeline(pipeline_dir: Path, tmp_path: Path) -> Path:
    """The tiny pipeline with a transformer of more blocks."""
    folder = tmp_path / "deep"
    shutil.copytree(pipeline_dir, folder)
    config = WanTransformer3DModel.load_config(folder / "transformer")
    torch.manual_seed(0)
    WanTransformer3DModel.from_config({**config, "num_layers": LAYERS_OF_RUN}).save_pretrained(folder / "transformer")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="stack", marks=pytest.mark.slow),
        pytest.param({"lora_rank": 2, "offload_activations": True}, id="lora-offload", marks=pytest.mark.slow),
        pytest.param(PACKED, id="pack", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_without_and_chosen_blocks_alone_run_again(
    settings: dict, deep_pipeline: Path, prepared_dir, tmp_path: Path
) -> None:
    losses, calls = [], []
    for count in (False, 2, True):
        trainer = Trainer(
            in_process(deep_pipeline, prepared_dir, tmp_path / str(count), gradient_checkpointing=count, **settings)
        )
        counted: Counter[int] = Counter()
        for index, block in enumerate(blocks_of(trainer.recipe.transformer)):
            first = next(block.children())
            first.register_forward_pre_hook(lambda *_, index=index, counted=counted: counted.update([index]))
        trainer.run()
        losses.append([line["train_loss"] for line in read_log(tmp_path / str(count), "losses")])
        calls.append([counted[index] / min(counted.values()) for index in range(LAYERS_OF_RUN)])
    assert losses[0] == losses[1] == losses[2]
    assert calls == [[1] * LAYERS_OF_RUN, [2, 1, 2, 1, 1], [1] * LAYERS_OF_RUN]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "chosen"), [(4.0, 0), (0.0, LAYERS_OF_RUN)])
def test_a_run_chooses_by_its_device(
    share: float, chosen: int, deep_pipeline: Path, prepared_dir, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(estimate, "_device_bytes", lambda accelerator: share * 2**40)
    settings = in_process(deep_pipeline, prepared_dir, tmp_path / "out", gradient_checkpointing="auto")
    losses = run(settings)
    assert f"--gradient_checkpointing auto chose {chosen} of {LAYERS_OF_RUN} blocks" in capsys.readouterr().out
    plain = run(in_process(deep_pipeline, prepared_dir, tmp_path / "plain"))
    assert losses == plain


@pytest.mark.every
@pytest.mark.slow
def test_shards_compute_some_blocks_again_with_the_same_losses(
    deep_pipeline: Path, prepared_dir, tmp_path: Path
) -> None:
    plain = {**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "false"}
    cases = {str(blocks): (plain, None, {**PACKS, "gradient_checkpointing": blocks}) for blocks in (True, 2, "auto")}
    train_all(cases, tmp_path, deep_pipeline, prepared_dir, num_processes=2)
    losses = [[line["train_loss"] for line in read_log(tmp_path / name, "losses")] for name in cases]
    assert losses[0] == losses[1] == losses[2]
    chosen = json.loads((tmp_path / "auto" / "training_config.json").read_text())["gradient_checkpointing"]
    assert chosen is False, "a tiny model fits"
