"""How EasyAnimate 5.1 is trained: flow matching with one shift for all sizes; text in a chat, with its padding."""

from __future__ import annotations

import math
from types import MappingProxyType

from ..recipe import Recipe
from ..shift import ShiftLaw
from .packing import FAMILY, TEXT_LENGTH


class EasyAnimateRecipe(Recipe):
    """Recipe of `EasyAnimatePipeline`; see [`Recipe`]."""

    pipeline_class = "EasyAnimatePipeline"
    family = FAMILY
    default_sequence_length = TEXT_LENGTH
    prompt_outputs = ("values",)
    native_sizes = ((512, 512),)
    call_defaults = MappingProxyType({"negative_prompt": ""})
    """Without any, the pipeline does not guide."""

    def shift(self) -> float | ShiftLaw:
        """Return the scheduler's shift, or what one that shifts by size makes of the 1 that the pipeline passes."""
        config = self.pipeline.scheduler.config
        if not config.get("use_dynamic_shifting"):
            return super().shift()
        return math.e if config.get("time_shift_type", "exponential") == "exponential" else 1.0


RECIPES = (EasyAnimateRecipe,)
