"""Settings of attention."""

from __future__ import annotations

from typing import Any, NamedTuple


class AttentionOptions(NamedTuple):
    """Settings of [`packed_attention`][hf_bucketing.packing.packed_attention]."""

    scale: float | None = None
    dropout: float = 0.0
    enable_gqa: bool = False

    def for_sdpa(self) -> dict[str, Any]:
        """Return the arguments of `scaled_dot_product_attention`."""
        return {"dropout_p": self.dropout, "scale": self.scale, "enable_gqa": self.enable_gqa}
