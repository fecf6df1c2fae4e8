"""Base of the recipes of pipelines that diffusers has only as blocks (`ModularPipeline`)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from .index import PipelineIndex
from .recipe import Recipe


class ModularRecipe(Recipe):
    """Recipe of a modular pipeline, of which a run loads and calls the blocks of one workflow."""

    workflow: ClassVar[str | None] = None
    """Workflow of the pipeline's blocks that generates from a caption; None where the blocks have one alone."""
    dropped_blocks: ClassVar[tuple[str, ...]] = ()
    """Blocks of the pipeline that a run does not call, such as one that rewrites captions."""

    @classmethod
    def blocks(cls, trained: str = "transformer") -> Any:
        """Return the blocks of the workflow, without those that are dropped."""
        import diffusers

        blocks = getattr(diffusers, cls.pipeline_type().default_blocks_name)()
        for name in cls.dropped_blocks:
            blocks.sub_blocks.pop(name)
        return blocks if cls.workflow is None else blocks.get_workflow(cls.workflow)

    @classmethod
    def called_components(cls, index: PipelineIndex, trained: str = "transformer") -> list[str]:
        """Return the components of the index that these blocks expect."""
        expected = {component.name for component in cls.blocks(trained).expected_components}
        return [name for name in index.components if name in expected]

    @classmethod
    def frames_of(cls, result: Any) -> np.ndarray:
        """Return the frames `(frames, height, width, 3)` of the state that the blocks return."""
        made = result.get(cls.output)
        return np.asarray(made if cls.output == "images" else made[0])
