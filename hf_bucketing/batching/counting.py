"""Tokens that samples are counted with: what a model adds to them, and which conditions are counted how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..columns.prepared import PreparedDataset
from ..columns.prepared_stream import PreparedStream
from ..conditions.condition import Condition, condition_named
from ..conditions.names import KEYFRAMES
from ..conditions.references import ReferenceRule, references_of
from ..conditions.rows import ConditionRules
from ..conditions.shares import appended_by
from ..models.recipe import Recipe
from ..packing.names import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokens:
    """What a model adds to the tokens of a sample, and how much they cost.

    Args:
        width (`int`): Channels of a token, which decide the cost of attention relative to all else.
        text_tokens (`int`): Tokens that a caption adds to the sequence of its sample, as a
            [`Recipe`][hf_bucketing.models.recipe.Recipe] counts them; `max_tokens` holds them.
        conditions (`tuple` of [`Condition`][hf_bucketing.conditions.condition.Condition]): What the model is shown of
            a sample, where each enters it and what each adds to the text.
        refuse (callable, *optional*): Returns why the model cannot take a sample of a token grid, or None if it can.
    """

    width: int
    text_tokens: int = 0
    conditions: tuple[Condition, ...] = ()
    refuse: Callable[[Grid], str | None] | None = None

    @classmethod
    def of(cls, recipe: Recipe) -> ModelTokens:
        """Return those of the model of a loaded recipe."""
        return cls(
            width=recipe.family.width(recipe.transformer),
            text_tokens=recipe.text_tokens(recipe.max_sequence_length),
            conditions=recipe.conditions,
            refuse=lambda grid: recipe.family.refusal(recipe.transformer, grid),
        )

    @property
    def references(self) -> ReferenceRule:
        """Condition of references: where they enter the model, and what each adds to the text of its sample."""
        return references_of(self.conditions)

    def rules_of(self, prepared: PreparedDataset | PreparedStream, *, condition: str | None = None) -> ConditionRules:
        """Return how the conditions of a data set are counted in a run with a `condition`.

        It does not matter for which model the data set was prepared. A reference in front of a sample has the sample's
        size. Frames that a run appends are counted as if each sample had the most of them.
        """
        return ConditionRules.of(
            prepared.conditions,
            references=prepared.references.entering(self.references),
            audio=prepared.audio,
            appended=appended_by(condition, condition_named(self.conditions, KEYFRAMES)),
            taken=self.conditions,
        )
