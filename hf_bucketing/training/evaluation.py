"""What a run computes between its steps: the loss of held-out samples, and renderings to files and to the tracker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from ..adapters.loading import without_frozen
from ..batching.ways import Experts
from ..buckets.sizes import LatentSpec, Size
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.names import REFERENCE
from ..conditions.references import ReferenceRule
from ..configuration.outputs import ValidationConfig, rendering_name
from ..errors import BucketingError, quoted
from ..media.probe import probe
from ..media.sample import load_first_frame, load_references
from ..media.source import MediaSource
from ..media.views import WHITE
from ..media.write import Sound, write_image, write_video
from ..models.calls import IMAGES
from ..models.experts import transformers_of
from ..models.first_frame import pictures
from ..models.loading import MODEL_PARTS, ModelPart, read_trained_config
from ..models.recipe import Recipe
from ..placement.sharding import SHARDED, rendering_in_lockstep, resharded
from .held_out_loss import HeldOutLoss, in_evaluation
from .opened import OpenedRun
from .trackers import track_rendering
from .trained import TrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Render every prompt at every size with the pipeline as it would be saved now.

    The noise of all renderings is that of one seed; `folder` receives `step-{n}/{size}-{prompt}.mp4`, or `.png` at
    sizes of one frame. `images` holds those of each prompt: none, a first frame, or a first and a last one;
    `references` those of each prompt, which are shown at the sizes of the data set's `rule`. Transparent parts of both
    are laid on the `background` of training.
    """

    config: ValidationConfig
    images: Sequence[Sequence[MediaSource]]
    references: Sequence[Sequence[MediaSource]]
    rule: ReferenceRule
    sizes: Sequence[Size]
    seed: int
    folder: Path
    background: str = WHITE

    def render(self, recipe: Recipe, accelerator: Accelerator, *, step: int) -> None:
        """Write one file per prompt and size, and give it to the trackers.

        Call it in the main process, or where weights are sharded in all of them; the main one writes.
        """
        transformers = [expert.transformer for expert in recipe.experts]
        training = [transformer.training for transformer in transformers]
        for transformer in transformers:
            transformer.eval()
        recipe.pipeline.set_progress_bar_config(disable=True)
        with ExitStack() as stack:
            for transformer, was_training in zip(transformers, training, strict=True):
                stack.callback(transformer.train, was_training)
                stack.enter_context(without_frozen(transformer))
            for size, number in product(self.sizes, range(len(self.config.validation_prompts or []))):
                with torch.no_grad(), accelerator.autocast():
                    frames, sound = self._sample(recipe, size, number)
                if not accelerator.is_main_process:
                    continue
                file = self.file_of(number, size, step=step)
                file.parent.mkdir(parents=True, exist_ok=True)
                if size.frames == 1:
                    write_image(file, frames[0])
                else:
                    write_video(file, frames, fps=self.config.validation_fps, sound=sound)
                for tracker in accelerator.trackers:
                    track_rendering(tracker, file, frames, fps=self.config.validation_fps, step=step)

    def describe(self) -> str:
        """Return what is rendered, in words."""
        count, steps = len(self.config.validation_prompts or []), self.config.validation_inference_steps
        sizes = ", ".join(map(str, self.sizes))
        return f"{count} prompt{'' if count == 1 else 's'} at {sizes} (--validation_sizes), in {steps} steps each"

    def file_of(self, number: int, size: Size, *, step: int) -> Path:
        """Return the file of the rendering of a prompt, by its position, at a size after an optimizer step.

        Its name has the first 60 characters of the prompt, and a number where those of an earlier prompt are the same.
        """
        name = rendering_name(self.config.validation_prompts or [], number, size)
        return self.folder / f"step-{step}" / f"{name}.{'png' if size.frames == 1 else 'mp4'}"

    def last_files(self, global_step: int) -> dict[Path, str]:
        """Return the files that were rendered after an optimizer step or last before it, and the prompt of each."""
        for step in (global_step, global_step - global_step % self.config.validation_steps):
            renderings = product(self.sizes, enumerate(self.config.validation_prompts or []))
            files = {self.file_of(number, size, step=step): prompt for size, (number, prompt) in renderings}
            if rendered := {file: prompt for file, prompt in files.items() if file.is_file()}:
                return rendered
        return {}

    def _sample(self, recipe: Recipe, size: Size, number: int) -> tuple[np.ndarray, Sound | None]:
        """Return frames of 8 bits, and their sound where audio is trained."""
        prompt = (self.config.validation_prompts or [])[number]
        images, references = self.images[number], self.references[number]
        loaded = {
            name: load_first_frame(image, size, background=self.background)
            for name, image in zip(IMAGES, images, strict=False)
        }
        fps = self.config.validation_fps if size.frames > 1 else 0.0
        options = {
            **loaded,
            "references": [
                pictures(pixels.transpose(0, 1))
                for pixels in load_references(references, size, self.rule, fps=fps, background=self.background)
            ],
            "num_inference_steps": self.config.validation_inference_steps,
            "guidance_scale": self.config.validation_guidance_scale,
            "generator": torch.Generator().manual_seed(self.seed),
        }
        sound = None
        if recipe.audio and size.frames > 1:
            frames, sound = recipe.render_with_sound(prompt, size, fps=fps, **options)
        else:
            frames = recipe.render(prompt, size, **options)
        return (frames * 255).round().astype(np.uint8), sound


def images_of(config: ValidationConfig, *, per_prompt: int, pipeline_class: str) -> list[list[MediaSource]]:
    """Return the images of each validation prompt.

    Args:
        config ([`ValidationConfig`]): Prompts and files.
        per_prompt (`int`): Images that a call of the pipeline takes.
        pipeline_class (`str`): Its class, for messages.

    Raises:
        BucketingError: If there are not as many files as the prompts need, or one cannot be decoded.
    """
    prompts, files = config.validation_prompts or [], config.validation_images or []
    if len(files) != per_prompt * len(prompts):
        needs = f"{per_prompt} per prompt" if per_prompt else "none"
        raise BucketingError(
            f"{pipeline_class} takes {needs} in `validation_images` ({len(prompts)} prompts), got {len(files)}."
        )
    sources = [MediaSource.from_cell(file) for file in files]
    for source in sources:
        probe(source)
    return [sources[per_prompt * row : per_prompt * (row + 1)] for row in range(len(prompts))]


def references_of(
    config: ValidationConfig, recipe: type[Recipe], *, trained: str = "transformer"
) -> list[list[MediaSource]]:
    """Return the references of each validation prompt.

    Args:
        config ([`ValidationConfig`]): Prompts and files.
        recipe (class of [`Recipe`]): What the model takes.
        trained (`str`): Name of the transformer that renders.

    Raises:
        BucketingError: If prompts would have unlike numbers of references, or the pipeline does not take as many, or a
            file cannot be decoded.
    """
    prompts, files = config.validation_prompts or [], config.validation_references or []
    if len(files) % len(prompts):
        raise BucketingError(
            f"`validation_references` shows each of the {len(prompts)} prompts as many files; got {len(files)}."
        )
    per_prompt = len(files) // len(prompts)
    if per_prompt > recipe.reference_condition().most or (per_prompt and REFERENCE not in recipe.call_arguments()):
        raise BucketingError(
            f"The call of a {recipe.pipeline_class} takes {recipe.reference_condition().most or 'no'} references, and "
            f"`validation_references` has {per_prompt} for each prompt."
        )
    recipe.check_renders(references=per_prompt, trained=trained)
    sources = [MediaSource.from_cell(file) for file in files]
    for source in sources:
        probe(source)
    return [sources[per_prompt * row : per_prompt * (row + 1)] for row in range(len(prompts))]


def parse_sizes(text: str, spec: LatentSpec) -> list[Size]:
    """Parse `"frames,height,width;…"`.

    Raises:
        BucketingError: If a size has another form, or the model cannot make it.
    """
    sizes = []
    for part in text.split(";"):
        if not re.fullmatch(r"\s*\d+\s*,\s*\d+\s*,\s*\d+\s*", part):
            raise BucketingError(f'Expected `validation_sizes` as "frames,height,width;…", got {part!r}.')
        size = Size(*map(int, part.split(",")))
        if spec.snap(size) != size:
            raise BucketingError(
                f"The model cannot make {size}; the nearest that it can is {spec.snap(size)} (`validation_sizes`)."
            )
        sizes.append(size)
    return sizes


logger = get_logger(__name__)


def plan_validation(opened: OpenedRun, prepared: PreparedDataset | PreparedStream) -> Validation | None:
    """Return what is rendered, with its images, references and sizes, if prompts are given.

    Raises:
        BucketingError: If images, references or sizes do not fit the prompts and the model.
    """
    config, recipe = opened.config, opened.recipe
    if not config.validation.validation_prompts:
        return None
    if not recipe.renders_prompts:
        raise BucketingError(
            f"Omit `validation_prompts`: the call of a {recipe.pipeline_class} needs videos of "
            f"{quoted(recipe.taken_conditions())}; render with hf_bucketing sample."
        )
    sizes = parse_sizes(config.validation.validation_sizes, opened.spec)
    if opened.trains_audio:
        recipe.sound_arguments(config.validation.validation_fps)  # raises before the first step
    component = transformers_of(config.trained_component)[0]
    num_images = recipe.num_images(read_trained_config(config.pretrained_model_name_or_path, component))
    cache = prepared.cache if isinstance(prepared, PreparedDataset) else None
    return Validation(
        config=config.validation,
        images=images_of(config.validation, per_prompt=num_images, pipeline_class=recipe.pipeline_class),
        references=references_of(config.validation, recipe, trained=component),
        rule=prepared.references,
        sizes=sizes,
        seed=config.seed,
        folder=Path(config.output_dir) / "validation",
        background=config.views.background if cache is None else cache.views.get("background", WHITE),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a run computes between its steps, with the averaged weights if there are any.

    Attributes:
        trained ([`TrainedModel`]): The transformers under training.
        experts ([`Experts`]): Their forwards of the run's kind of batches.
        called (sequence of `str`): Frozen parts of the pipeline that steps call, which are on the device.
        held_out ([`HeldOutLoss`], *optional*): Held-out samples.
        validation ([`Validation`], *optional*): Prompts to render.
    """

    trained: TrainedModel
    experts: Experts
    called: Sequence[ModelPart]
    held_out: HeldOutLoss | None
    validation: Validation | None

    @property
    def intervals(self) -> list[int]:
        """Optimizer steps between two held-out losses and between two renderings, if there are any."""
        losses = [] if self.held_out is None else [self.held_out.config.validation_loss_steps]
        return losses + ([] if self.validation is None else [self.validation.config.validation_steps])

    def held_out_loss(self, global_step: int, *, last: bool = False) -> dict[str, Any] | None:
        """Return the held-out loss and what the log says of it, if it is due; call it on every process.

        Step 0 is before the first one.
        """
        if self.held_out is None:
            return None
        trained, config = self.trained, self.held_out.config
        every = global_step % config.validation_loss_steps == 0
        if not (last or (every if global_step else config.validation_loss_on_start)):
            return None
        with trained.averages(), resharded(trained.recipe.transformer), ExitStack() as stack:
            for transformer in trained.transformers.values():
                stack.enter_context(in_evaluation(transformer))
            return self.held_out.compute(self.experts, trained.for_evaluation, trained.accelerator)

    def render(self, global_step: int, *, last: bool = False) -> None:
        """Render the prompts, if it is due or after the last step, in the main process; call it on every process.

        Where no process holds all weights, all of them render.
        """
        if self.validation is None or not (last or global_step % self.validation.config.validation_steps == 0):
            return
        trained, recipe, accelerator = self.trained, self.trained.recipe, self.trained.accelerator
        with trained.averages():
            if accelerator.is_main_process or accelerator.distributed_type in SHARDED:
                moved = recipe.moved_to(accelerator.device, *(set(MODEL_PARTS) - {"trained", *self.called}))
                removed = trained.context_parallel.removed()
                logger.info(f"Renders {self.validation.describe()}")
                with removed, self.experts.unpacked(), moved, rendering_in_lockstep(recipe):
                    self.validation.render(recipe, accelerator, step=global_step)
        accelerator.wait_for_everyone()
