"""GLM-Image is packed, and its pipeline not trained."""

from __future__ import annotations

from ..recipe import Recipe

RECIPES: tuple[type[Recipe], ...] = ()
REFUSED = {
    "GlmImagePipeline": (
        "its transformer draws after one token for each patch, which the pipeline's vision-language model makes of an "
        "image, and the processor of that model resizes images, such as those below 512 pixels, so that they have "
        "another number of tokens than of patches"
    )
}
