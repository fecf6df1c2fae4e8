"""How LTX-2 is trained on video without audio: flow matching, shifted by size; text through the connectors."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...buckets.sizes import Size
from ...errors import BucketingError
from ...media.sample import frame_rates
from ...packing.family import UNLIMITED
from ..first_frame import FirstFrameRecipe
from ..ltx.packing import reference_factors
from ..ltx.recipe import LTXRecipe
from ..recipe import Recipe, Samples, TextEmbeddings
from .packing import FAMILY, modulates_text


class LTX2Recipe(LTXRecipe):
    """Recipe of `LTX2Pipeline`; see [`Recipe`][hf_bucketing.models.recipe.Recipe].

    Audio is neither encoded nor predicted, and what belongs to it is not trained.
    """

    pipeline_class = "LTX2Pipeline"
    family = FAMILY
    max_references = 0
    default_sequence_length = 1024
    native_sizes = ((512, 768), (1024, 1536))
    """The pipeline's default, and twice that, the second stage of the model's own pipelines."""

    @classmethod
    def load(cls, name_or_path: str, **options: Any) -> Recipe:
        """Load a pipeline, see [`Recipe.load`]; refuse a length of texts that its connectors cannot fill up."""
        recipe = super().load(name_or_path, **options)
        connectors, length = recipe.pipeline.connectors, recipe.max_sequence_length
        registers = None if connectors is None else connectors.config.video_connector_num_learnable_registers
        if registers and length % registers:
            raise BucketingError(
                f"`max_sequence_length` must be a multiple of {registers}, the number of registers with which this "
                f"model's connectors fill up a text, got {length}."
            )
        return recipe

    @torch.no_grad()
    def encode_text(self, captions: list[str]) -> TextEmbeddings:
        """Encode captions, and pass them through the connectors, as the pipeline's call does."""
        states, mask, _, _ = self._encode_prompt(captions)
        side = self.pipeline.tokenizer.padding_side
        values, _, mask = self.pipeline.connectors(states, mask, padding_side=side)
        return TextEmbeddings(values, mask)

    def conditioning(self, samples: Samples) -> dict[str, Any]:
        """Return the frame rates, and the noise levels where the model modulates its text by them."""
        rates = {"fps": frame_rates(samples.fps)}
        return {**rates, "sigma": samples.noised.timesteps} if modulates_text(self.transformer) else rates


class LTX2ImageToVideoRecipe(FirstFrameRecipe, LTX2Recipe):
    """Recipe of `LTX2ImageToVideoPipeline`; see [`FirstFrameRecipe`]."""

    pipeline_class = "LTX2ImageToVideoPipeline"


class LTX2InContextRecipe(LTX2Recipe):
    """Recipe of `LTX2InContextPipeline`, whose samples have references that lie over them, of any smaller size.

    References are clean and have timestep 0; prepare them with `--reference_downscale_factor`. The pipeline counts
    their tokens when it shifts its noise levels, and training does not, as for other pipelines with references.
    """

    pipeline_class = "LTX2InContextPipeline"
    max_references = UNLIMITED
    shown_as = MappingProxyType({"reference": "reference_conditions"})

    @classmethod
    def reference_arguments(cls, references: Sequence[Sequence[Any]], size: Size) -> dict[str, Any]:
        """Return references with their `reference_downscale_factor`, which must be the same for all of them.

        Raises:
            BucketingError: If the sizes of references are no equal fractions of the sample's.
        """
        from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

        sizes = [(1, frames[0].height, frames[0].width) for frames in references]
        factor, *others = set(reference_factors([(1, size.height, size.width), *sizes]))
        if others:
            raise BucketingError(
                f"The call of a {cls.pipeline_class} takes references of one size, got {sorted(set(sizes))}."
            )
        conditions = [LTX2ReferenceCondition(frames=list(frames)) for frames in references]
        return {cls.shown_as["reference"]: conditions, "reference_downscale_factor": factor}


RECIPES = (LTX2Recipe, LTX2ImageToVideoRecipe, LTX2InContextRecipe)
