"""A condition: what a model is shown of a sample beside its noisy latents and its caption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from .sizes import SizeRule

Enters: TypeAlias = Literal["tokens", "latent frames", "channels", "in place", "loss weight"]
"""Where a condition enters a model: as further grids of tokens, as latent frames in front of those of the sample, as
further channels of its latents, in place of a part of them, or as weights of their loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition(SizeRule):
    """Declare a condition that a recipe takes.

    Args beside those of [`SizeRule`][hf_bucketing.conditions.sizes.SizeRule]:
        name (`str`): Its name, by which a data set has a column of it.
        enters (`"tokens"`, `"latent frames"`, `"channels"`, `"in place"` or `"loss weight"`): Where it enters the
            model.
        own_frames (`bool`): Whether it is made of frames of the sample alone, so that no column of a data set has it.
        least (`int`): Fewest of a sample with which the model can be trained: 0 where a data set may lack it.
        most (`int`): Most of a sample.
        argument (`str`, *optional*): Argument of the pipeline's call that takes it; None where the call takes none, or
            takes it as an image to begin with.
        in_text (`bool`): Whether the text encoder is shown it too.
        text_tokens (`int`): Tokens that each adds to the text of its sample, counted with its own.
        text_factor (`int`): How many further ones it adds to that text for each token that it has itself.
        max_ratio (`float`, *optional*): Largest ratio of its longer to its shorter side; by default any.
        pictures_only (`bool`): Whether it is a picture, never a video.
    """

    name: str
    enters: Enters
    own_frames: bool = False
    least: int = 0
    most: int = 1
    argument: str | None = None
    in_text: bool = False
    text_tokens: int = 0
    text_factor: int = 0
    max_ratio: float | None = None
    pictures_only: bool = False
