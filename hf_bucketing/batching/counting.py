"""Tokens that samples are counted with: what a model adds to them, and which conditions are counted how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..media.conditions import REFERENCE
from ..media.references import Appended, ReferenceRule
from ..models.conditioning import appended_by
from ..models.recipe import Recipe
from ..packing.names import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """What a model adds to the tokens of a sample, and how much they cost.

    Args:
        width (`int`): Channels of a token, which decide the cost of attention relative to all else.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its sample, as a
            [`Recipe`][hf_bucketing.models.recipe.Recipe] counts them; `max_tokens` holds them.
        references_in_front (`bool`): Whether references are latent frames in front of a sample.
        reference_text_tokens (`int`): Tokens that each reference of a sample adds to its text.
        keyframe_text_tokens (`int`, *optional*): Where the text encoder sees appended frames, tokens that each adds to
            its text beside as many as it has itself.
        reference_text_factor (`int`): How many further ones each reference adds for each token that it has itself.
        refuse (callable, *optional*): Returns why the model cannot take a sample of a token grid, or None if it can.
    """

    width: int
    text_tokens: int = 0
    references_in_front: bool = False
    reference_text_tokens: int = 0
    keyframe_text_tokens: int | None = None
    reference_text_factor: int = 0
    refuse: Callable[[Grid], str | None] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> ModelTokens:
        """Return those of the model of a loaded recipe."""
        return cls(
            width=recipe.family.width(recipe.transformer),
            text_tokens=recipe.text_tokens(recipe.max_sequence_length),
            references_in_front=recipe.references_in_front,
            reference_text_tokens=recipe.reference_text_tokens,
            keyframe_text_tokens=recipe.keyframe_text_tokens,
            reference_text_factor=recipe.reference_text_factor,
            refuse=lambda grid: recipe.family.refusal(recipe.transformer, grid),
        )

    def rule_of(
        self, prepared: PreparedDataset | PreparedStream, *, condition: str | None = None
    ) -> ReferenceRule | None:
        """Return the [`counting_rule`] of a data set in a run with a `condition`."""
        return counting_rule(
            prepared,
            in_front=self.references_in_front,
            text_tokens=self.reference_text_tokens,
            text_factor=self.reference_text_factor,
            frames=appended_by(condition, seen=self.keyframe_text_tokens),
        )


def counting_rule(
    prepared: PreparedDataset | PreparedStream,
    *,
    in_front: bool,
    text_tokens: int = 0,
    text_factor: int = 0,
    frames: Appended,
) -> ReferenceRule | None:
    """Return the rule that counts what samples are shown beside themselves, whatever model they were prepared for.

    A reference in front of a sample has the sample's size; one that the text encoder sees adds `text_tokens`, and
    `text_factor` times its own. `frames` that a run appends are counted as if each sample had the most of them. None
    if nothing is shown.
    """
    if REFERENCE not in prepared.conditions and not frames.most:
        return None
    rule = replace(prepared.references, in_front=in_front, text_tokens=text_tokens, text_factor=text_factor)
    return rule.appending(frames).counted
