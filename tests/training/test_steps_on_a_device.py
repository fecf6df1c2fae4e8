"""A whole training step of every recipe on a device: the CPU's numbers, and no wait for the device before its end."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType

from hf_bucketing.adapters.kinds import adapters_of
from hf_bucketing.adapters.lora import add_adapters
from hf_bucketing.adapters.settings import AdapterConfig
from hf_bucketing.batching.buckets import BucketStep
from hf_bucketing.batching.drawing import latent_frames_of, media_of, text_of
from hf_bucketing.batching.own_sizes import PackStep
from hf_bucketing.batching.run_data import StepRows
from hf_bucketing.batching.steps import Step
from hf_bucketing.buckets.cost import CostModel
from hf_bucketing.conditions.audio import AUDIO
from hf_bucketing.conditions.names import KEYFRAMES
from hf_bucketing.conditions.shares import read_conditions
from hf_bucketing.configuration import BatchConfig, TrainingConfig
from hf_bucketing.configuration.objective import PreservationConfig
from hf_bucketing.devices import DeviceTimer, to_device
from hf_bucketing.media.rows import REGULARIZATION
from hf_bucketing.models import enable_packing
from hf_bucketing.models.loading import MODEL_PARTS
from hf_bucketing.models.recipe import Recipe
from hf_bucketing.models.registry import recipe_of
from hf_bucketing.models.samples import KEYFRAME_PLACES, REFERENCES
from hf_bucketing.models.texts import TextEmbeddings
from hf_bucketing.training.reporting import RunReport
from tests.devices import Device, assert_same_gradients, on_cpu
from tests.models.families import RECIPES
from tests.models.kin import one_per_kin
from tests.models.recipe_cases import RecipeCase
from tests.models.test_recipe_suite import batch_of, folder_of
from tests.packing.test_packing_devices import FIRST_WAITS, LIMITS, STOCK_WAITS, WAITS_OF

__all__ = ["folder_of"]

FAST = ("wan", "lumina2")
"""Recipes that are tried in every run of the tests; the others in the slow ones."""
AT_THE_END = {"wait for an event in hf_bucketing/devices.py:values": 1}
"""All that is read of an optimizer step, however many batches it has, is read once, after its last backward pass."""
TIMES = "wait for an event in hf_bucketing/devices.py:seconds"
PACKED_WAITS = {**STOCK_WAITS, **FIRST_WAITS, TIMES: "reads the times of batches, at the end as well"}
STACKED_WAITS = {
    **PACKED_WAITS,
    "aten.index.Tensor in transformers/transformer_hunyuanimage.py:forward": "sorts texts by their masks",
    "aten.index.Tensor in transformers/transformer_hunyuan_video15.py:forward": "sorts texts by masks",
    "aten._local_scalar_dense.default in transformers/transformer_hunyuan_video15.py:forward": "looks for images",
    "aten.index_put.default in training/test_steps_on_a_device.py:train": "the backward of texts sorted by masks",
    "tolist in transformers/transformer_lumina2.py:forward": "reads how long texts are",
    "aten.nonzero.default in models/attention_processor.py:__call__": "Mochi leaves padding out",
    "copy to the device in models/embeddings.py:apply_rotary_emb": "CogView 4 makes its positions on the CPU",
    "copy to the device in transformers/transformer_qwenimage.py:compute_text_seq_len_from_mask": "numbers the text",
    "aten.equal.default in packing/batch.py:frame_timesteps": "timesteps of tokens are checked to be those of frames",
}
"""What waits in stacks beside that, and why: diffusers' forwards as they are, and a check of ours."""
BACKWARD = "in packing/test_packing_devices.py:step", "in training/test_steps_on_a_device.py:train"
_QWEN_21 = "in transformers/transformer_qwenimage21.py:forward"
WAITS_OF_MODELS = {
    "qwen-image-2.1": {
        *(wait.replace(*BACKWARD) for wait in WAITS_OF["qwen-image-2.1"]),
        *(f"aten.{operation} {_QWEN_21}" for operation in ("index.Tensor", "nonzero.default")),  # by texts' masks
    }
}
"""What the stock forward of a single model waits for, whatever it is passed."""


@pytest.mark.parametrize(
    ("name", "batching"),
    [
        pytest.param(
            *recipe.values,
            batching,
            marks=[*recipe.marks, *([pytest.mark.every] if recipe.marks and batching == "bucket" else [])],
        )
        for recipe in one_per_kin(RECIPES, fast=FAST, few=True)
        for batching in ("bucket", "pack")
    ],
)
def test_a_training_step_waits_for_its_device_at_the_end_alone(
    device: Device, name: str, batching: str, folder_of
) -> None:
    case, stacked = RECIPES[name], batching == "bucket"
    batch = batch_of(case, case.shown[-1] if case.shown else (), stacked=stacked)
    step, step_there = (make_step(case, folder_of(case), stacked=stacked) for _ in range(2))
    named = (STACKED_WAITS if stacked else PACKED_WAITS).keys() | WAITS_OF_MODELS.get(name, set())
    check_step(device, step, step_there, batch, named=named, limit=LIMITS.get(name, 1e-4))


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_step_with_targets_of_the_base_model_waits_at_its_end_alone(
    device: Device, batching: str, folder_of
) -> None:
    case, stacked = RECIPES["wan"], batching == "bucket"
    batch = batch_of(case, (), stacked=stacked)
    others = len(batch["index"]) - 1
    batch[REGULARIZATION] = [True, *[False] * others]
    config = PreservationConfig(preservation="prior", preservation_weight=0.5, slider=["red|blue"])
    step, step_there = (make_step(case, folder_of(case), stacked=stacked, preservation=config) for _ in range(2))
    logged = check_step(
        device, step, step_there, batch, named={*(STACKED_WAITS if stacked else PACKED_WAITS)}, limit=1e-4
    )
    by_target = {name: value for name, value in logged.items() if "target" in name}
    assert by_target.keys() == {"loss_by_target/preservation", "loss_by_target/slider"}
    preserved, slid = by_target.values()
    counted = {"preserved": 2, "slid": 2 * others - 1}
    mean = (counted["preserved"] * preserved + counted["slid"] * slid) / sum(counted.values())
    assert mean == pytest.approx(logged["train_loss"])


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_step_of_drawn_conditions_waits_at_its_end_alone(device: Device, batching: str, folder_of) -> None:
    case, stacked = RECIPES["ltx"], batching == "bucket"
    batch, shares = batch_of(case, ("mask",), stacked=stacked), read_conditions("prefix+mask:0.5,keyframes:0.5")
    step, step_there = (make_step(case, folder_of(case), stacked=stacked) for _ in range(2))
    step.condition = step_there.condition = shares
    check_step(device, step, step_there, batch, named={*(STACKED_WAITS if stacked else PACKED_WAITS)}, limit=1e-4)


@pytest.mark.cases(slow=("pretended-ltx2-pack-shown", "pretended-ltx2-stack-both", "pretended-ltx2-silent stack-both"))
@pytest.mark.parametrize("conditions", [None, "video:0.4,audio:0.4,no_audio:0.2"], ids=["both", "shown"])
@pytest.mark.parametrize("tokens", [(16, 0, 28), (16,), (0,)], ids=["pack", "stack", "silent stack"])
@pytest.mark.parametrize(
    "name", ["ltx2", *(pytest.param(name, marks=pytest.mark.every) for name in ("minimax-h3", "kandinsky6"))]
)
def test_a_step_with_audio_waits_at_its_end_alone(
    device: Device, name: str, tokens: tuple[int, ...], conditions: str | None, folder_of
) -> None:
    case, stacked = RECIPES[name], len(tokens) == 1
    batch, folder = batch_of(case, (), stacked=stacked), str(folder_of(case))
    counts = tokens * (len(batch["index"]) if stacked else 1)
    recipe = recipe_of(folder)
    rule = recipe.read_audio_rule(folder)
    batch["fps"] = [recipe.sound_fps or fps for fps in batch["fps"]]
    batch["shown"] = {AUDIO: [torch.rand(2, rule.num_samples(count)) * 2 - 1 for count in counts]}
    step, step_there = (make_step(case, folder_of(case), stacked=stacked, audio=True) for _ in range(2))
    if conditions is not None:
        step.condition = step_there.condition = read_conditions(conditions)
    check_step(device, step, step_there, batch, named={*(STACKED_WAITS if stacked else PACKED_WAITS)}, limit=1e-4)


@pytest.mark.cases(slow=("pretended-minimax-h3-*-pack", "pretended-kandinsky6-none*-bucket"))
@pytest.mark.parametrize("batching", ["bucket", "pack"])
@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("minimax-h3", "appended_first_frame+appended_last_frame"),
        ("kandinsky6", "appended_first_frame"),
        ("kandinsky6", "none:0.5,appended_first_frame:0.5"),
    ],
)
def test_a_step_with_first_and_last_frames_waits_at_its_end_alone(
    device: Device, name: str, shares: str, batching: str, folder_of
) -> None:
    case, stacked = RECIPES[name], batching == "bucket"
    batch = batch_of(case, (), stacked=stacked)
    step, step_there = (make_step(case, folder_of(case), stacked=stacked, references=True) for _ in range(2))
    step.condition = step_there.condition = read_conditions(shares)
    check_step(device, step, step_there, batch, named={*(STACKED_WAITS if stacked else PACKED_WAITS)}, limit=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_step_with_references_that_texts_see_waits_at_its_end_alone(
    device: Device, batching: str, folder_of
) -> None:
    case, stacked = RECIPES["minimax-h3"], batching == "bucket"
    batch = batch_of(replace(case, references=(((1, 64, 96), (1, 128, 64)),) * 3), ("reference",), stacked=stacked)
    made = (make_step(case, folder_of(case), stacked=stacked, trained="transformer_ref") for _ in range(2))
    check_step(device, *made, batch, named={*(STACKED_WAITS if stacked else PACKED_WAITS)}, limit=1e-4)


def check_step(
    device: Device, step: Step, step_there: Step, batch: Mapping[str, Any], *, named: set[str], limit: float
) -> dict[str, float]:
    """Check that a step on the device has the CPU's numbers, and waits at its end alone; return what it logs."""
    metrics = train(step, batch, device=torch.device("cpu"))
    for module in step_there.recipe.modules(*MODEL_PARTS):
        device.move_module(module)
    with device.recording() as waits:
        drawn = step_there.draw(batch, [(0, 0, index) for index in batch["index"]])
        appended = [sample.appended for sample in drawn]
        encoded = encode(device, step_there.recipe, batch, on_the_cpu=step.recipe, appended=appended)
        step_there.texts = {
            caption: step_there.recipe.encode_text([caption]) for caption in step.preservation.captions
        }
        waits.clear()  # pipelines wait where they tokenize and encode; a step that reads a cache does neither
        metrics_there = train(step_there, encoded, device=device.device)
    waits.check(named, counted=AT_THE_END)
    assert metrics_there == pytest.approx(metrics, rel=max(1e-4, device.rounding))
    assert_same_gradients(
        step.recipe.transformer, step_there.recipe.transformer, limit=max(limit, device.gradient_rounding)
    )
    return metrics_there


def make_step(
    case: RecipeCase,
    folder: Path,
    *,
    stacked: bool,
    preservation: PreservationConfig | None = None,
    **trained: Any,
) -> Step:
    """Return a step, of adapters where a base model is preserved; `trained` goes to `Recipe.load`."""
    recipe = recipe_of(str(folder)).load(str(folder), max_sequence_length=case.max_sequence_length, **trained)
    common: dict[str, Any] = {
        "recipe": recipe,
        "objective": recipe.objective(weighting_scheme=None, snr_gamma=None, seed=0),
    }
    if preservation is not None:
        common["preservation"] = preservation
        torch.manual_seed(0)
        add_adapters(recipe.transformer, AdapterConfig(lora_rank=2))
        for value in adapters_of(recipe.transformer).values():
            torch.nn.init.normal_(value, std=0.1)
    if stacked:
        return BucketStep(**common)
    return PackStep(**common, packing=enable_packing(recipe.transformer, strip_length=8))


def encode(
    device: Device,
    recipe: Recipe,
    batch: Mapping[str, Any],
    *,
    on_the_cpu: Recipe,
    appended: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Encode a batch on the device, and return it as a collator that reads a cache does, moved by accelerate.

    A cache holds the frames of all latent frames. Texts of MiniMax-H3 see those that are appended, and references:
    transformers, which then counts positions in a way that the pretended device lacks, encodes these on the CPU.
    """
    shown = device.move({name: batch[name] for name in ("pixel_values", "shown")})
    if any(appended):
        media = media_of(recipe, shown, appended=[range(count) for count in latent_frames_of(batch, recipe.spec)])
        media.pop(KEYFRAME_PLACES)
    else:
        media = media_of(recipe, shown)
    if recipe.text_sees_keyframes and (any(appended) or REFERENCES in media):
        text = text_of(on_the_cpu, batch, keyframes=recipe.keyframes_at(appended)[KEYFRAMES])
        text = TextEmbeddings(device.move(text.values), text.mask, device.move(dict(text.others)))
    else:
        text = text_of(recipe, {**batch, **shown})
    masks = {name: on_cpu(values).float().numpy() for name, values in text.others.items() if "mask" in name}
    about = {name: batch[name] for name in ("fps", "index", "caption", REGULARIZATION) if name in batch}
    mask = {} if text.mask is None else {"text_mask": on_cpu(text.mask).numpy()}
    latents = media.pop("latents")
    others = {**text.others, **masks}
    return {
        **about,
        **mask,
        "latents": latents,
        "conditions": media,
        "text_values": text.values,
        "text_others": others,
    }


def train(step: Step, batch: Mapping[str, Any], *, device: torch.device) -> dict[str, float]:
    """Run an optimizer step of two batches as the loop does; return what is logged of it, but for times.

    The batches are the same; of the second one, the last sample does not count.
    """
    transformer, number = step.recipe.transformer, len(batch["index"])
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    weights = torch.ones(2, number) / (2 * number - 1)
    weights[1, -1] = 0
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(step, device=device, folder=folder)
        for weight in weights:
            timer = DeviceTimer(device)
            losses = step(transformer, batch, epoch=1)
            there = to_device(weight, device)
            (losses.values * there).sum().backward()
            rows = StepRows(weights=weight, total=1.0, tokens=np.full(number, 8))
            report.batch(losses, rows, there, batch, epoch=1, step=0, timer=timer)
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        logged = report.read(report.finish(1.0, grad_norm=norm, stop=0))
        optimizer.step()
        report.samples()
        report.log.close()
    assert logged["samples"] == 2 * number - 1
    return {name: value for name, value in logged.items() if "second" not in name}


def report_of(step: Step, *, device: torch.device, folder: str) -> RunReport:
    """Return what tells of a run on a device."""
    accelerator: Any = SimpleNamespace(
        device=device, process_index=0, num_processes=1, gather=lambda sums: sums, distributed_type=DistributedType.NO
    )
    data: Any = SimpleNamespace(sources=(), cost_model=CostModel(linear=1.0, quadratic=0.0))
    config = TrainingConfig(
        pretrained_model_name_or_path="model",
        dataset_dir="data",
        output_dir=folder,
        batches=BatchConfig(batching="bucket", train_batch_size=2),
        preservation=step.preservation,
        adapters=AdapterConfig(lora_rank=2),
    )
    return RunReport(config, data, accelerator, keep=None)
