"""AnyFlow is packed, and its pipelines not trained."""

from __future__ import annotations

from ..recipe import Recipe

_REASON = (
    "its model is distilled to predict the mean velocity between the noise level of a step and the next, and flow "
    "matching, which trains the velocity at one level, would leave the steps between levels as they are"
)

RECIPES: tuple[type[Recipe], ...] = ()
REFUSED = {"AnyFlowPipeline": _REASON, "AnyFlowFARPipeline": _REASON}
