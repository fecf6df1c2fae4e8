"""ConsisID is packed, and its pipeline not trained."""

from __future__ import annotations

from ..recipe import Recipe

RECIPES: tuple[type[Recipe], ...] = ()
REFUSED = {
    "ConsisIDPipeline": (
        "its call takes embeddings of a face, which models outside the pipeline make, and a data set has no column "
        "for them; a loop of your own can pack its transformer, with the embeddings as conditioning"
    )
}
