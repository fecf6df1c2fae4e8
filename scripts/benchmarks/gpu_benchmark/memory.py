"""Planned beside measured memory, and the saved pipeline that planner and quantisation load."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from hf_bucketing.placement.quantization import quantization_of
from hf_bucketing.planner.memory import plan_memory
from hf_bucketing.planner.settings import PlanConfig
from hf_bucketing.synthetic.published import write_published_configs

from .measuring import Cases, Figures, Run, attempt, free
from .models import RANK, Stepper, draw, make_transformer
from .scale import Scale


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One combination whose memory is planned and measured.

    Attributes:
        lora: Whether adapters are trained, or the whole transformer.
        checkpointing: Whether the backward pass recomputes activations.
        trained_dtype, quantize_base: As in the training script.
        long: Whether samples are long clips, or short ones.
        samples: Samples of the step.
    """

    lora: bool = True
    checkpointing: bool = True
    trained_dtype: str = "float32"
    quantize_base: str | None = None
    long: bool = True
    samples: int = 1

    def size(self, scale: Scale) -> tuple[int, int, int]:
        """Return frames, height and width of the samples."""
        return scale.long_clip if self.long else scale.short_clip

    def model(self, scale: Scale, folder: Path) -> WanTransformer3DModel:
        """Return the transformer, without adapters."""
        if self.quantize_base is not None:
            return load_transformer(scale, folder, self.quantize_base)
        half = self.lora or self.trained_dtype == "bf16"
        return make_transformer(scale, layers=scale.layers, dtype=torch.bfloat16 if half else torch.float32)


SETTINGS = {
    "LoRA": Setting(),
    "full": Setting(lora=False),
    "LoRA, 4 samples": Setting(samples=4),
    "LoRA, no checkpointing": Setting(checkpointing=False, long=False),
    "LoRA, int8 base": Setting(quantize_base="int8"),
    "LoRA, nf4 base": Setting(quantize_base="nf4"),
    "full, bf16": Setting(lora=False, trained_dtype="bf16"),
    "full, no checkpointing": Setting(lora=False, checkpointing=False, long=False),
}


def cases(run: Run) -> Cases:
    """Yield settings: the planner's estimate, and the peak of allocated memory in two steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pipeline(run.scale, folder, layers=run.scale.layers)
        for title, setting in SETTINGS.items():

            def compare(setting: Setting = setting) -> Figures:
                free()
                planned = plan(run.scale, folder, setting)
                figures = {"planned_gib": planned, **attempt(lambda: measured(run, folder, setting))}
                if "measured_gib" in figures:
                    figures["planned_of_measured"] = planned / figures["measured_gib"]
                return figures

            yield title, compare


def plan(scale: Scale, folder: Path, setting: Setting) -> float:
    """Return the planned peak in GiB, without the constant for the CUDA context, which torch does not count."""
    planned = plan_memory(
        str(folder),
        PlanConfig.from_flat(
            mixed_precision="bf16",
            sample_size=list(setting.size(scale)),
            train_batch_size=setting.samples,
            cached="all",
            max_sequence_length=scale.text_length,
            device=scale.device,
            gradient_checkpointing=setting.checkpointing,
            trained_dtype=setting.trained_dtype,
            quantize_base=setting.quantize_base,
            lora_rank=RANK if setting.lora else None,
        ),
    )
    return (planned.total - planned.peak.context) / 2**30


def measured(run: Run, folder: Path, setting: Setting) -> Figures:
    scale = run.scale
    if setting.quantize_base == "nf4" and not scale.on_gpu:
        return {"not_run": "needs a GPU"}
    inputs = draw(scale, [scale.spec.grid(setting.size(scale))] * setting.samples)
    before = torch.cuda.memory_allocated() / 2**30 if scale.on_gpu else 0.0
    figures: Figures = {}
    model = setting.model(scale, folder)  # loading may take more than training
    with run.peak_memory(figures):
        trainer = Stepper(scale, model, lora=setting.lora, checkpointing=setting.checkpointing, backend=None)
        for _ in range(2):  # the first makes the moments
            trainer.stacked(inputs)
    return {"measured_gib": figures["peak_gib"] - before} if scale.on_gpu else {"not_run": "needs a GPU"}


def save_pipeline(scale: Scale, folder: Path, *, layers: int) -> None:
    """Save a transformer in bf16 in a pipeline whose other components have configurations, but no weights."""
    write_published_configs(folder, "wan-1.3b")
    make_transformer(scale, layers=layers, dtype=torch.bfloat16).save_pretrained(str(folder / "transformer"))


def load_transformer(scale: Scale, folder: Path, kind: str | None) -> WanTransformer3DModel:
    """Load the saved transformer in bf16, its blocks quantised in a format of `--quantize_base`."""
    config = WanTransformer3DModel.load_config(str(folder), subfolder="transformer")
    with torch.device("meta"):
        empty = WanTransformer3DModel.from_config(config)
    options: dict[str, Any] = {}
    if kind is not None:
        options = {"quantization_config": quantization_of(kind, empty, dtype=torch.bfloat16)}
    model = WanTransformer3DModel.from_pretrained(
        str(folder), subfolder="transformer", torch_dtype=torch.bfloat16, **options
    )
    return model.to(scale.device)
