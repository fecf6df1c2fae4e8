"""Cosmos: rotary positions in seconds, and learned positions in every block; text with zero padding."""

from .packing import FAMILY, CosmosFamily

__all__ = ["FAMILY", "CosmosFamily"]
