"""Why Allegro is not trained: its VAE encodes no other sizes than those that its tiles fill."""

from __future__ import annotations

from ..recipe import Recipe

RECIPES: tuple[type[Recipe], ...] = ()

REFUSED = {
    "AllegroPipeline": (
        "diffusers encodes with its VAE tile by tile only, in tiles of 24×320×320 pixels, and returns zeros for what "
        "does not fill a tile, so for every image and for most sizes of videos"
    )
}
