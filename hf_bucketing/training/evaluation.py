"""What a run computes between its steps: the loss of held-out samples, and renderings of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from ..batching.ways import Experts
from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..errors import BucketingError, quoted
from ..media.views import WHITE
from ..models.experts import transformers_of
from ..models.loading import MODEL_PARTS, ModelPart, read_trained_config
from ..placement.sharding import SHARDED, rendering_in_lockstep, resharded
from .held_out_loss import HeldOutLoss, in_evaluation
from .opened import OpenedRun
from .trained import TrainedModel
from .validation import Validation, images_of, parse_sizes, references_of

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
