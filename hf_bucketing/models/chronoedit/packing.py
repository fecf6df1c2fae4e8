"""How ChronoEdit is packed: as Wan, with a temporal position of its own for the second of two latent frames."""

from __future__ import annotations

from ..wan.packing import WanFamily


class ChronoEditFamily(WanFamily):
    """Packing of `ChronoEditTransformer3DModel`; see [`Family`][hf_bucketing.packing.family.Family].

    A sample of two latent frames, an image and its edit, has the temporal positions 0 and `rope_temporal_skip_len - 1`
    of the model's own table, so that positions cannot be stretched.
    """

    transformer_class = "ChronoEditTransformer3DModel"
    tested_forwards = ("053735e369e9",)
    interpolates = False


FAMILY = ChronoEditFamily()
