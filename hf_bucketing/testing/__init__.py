"""Small generated media and pipelines with random weights, for the demo and for tests without a hub."""

from .media import DEMO_CLIPS, Clip, make_media_dataset, render
from .pipeline import make_tiny_pipeline

__all__ = ["DEMO_CLIPS", "Clip", "make_media_dataset", "make_tiny_pipeline", "render"]
