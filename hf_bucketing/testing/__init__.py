"""Small generated media and pipelines with random weights, for the demo and for tests without a hub."""

from typing import TYPE_CHECKING, Any

from .media import DEMO_CLIPS, Clip, make_media_dataset, render

if TYPE_CHECKING:
    from .pipeline import make_tiny_pipeline

__all__ = ["DEMO_CLIPS", "Clip", "make_media_dataset", "make_tiny_pipeline", "render"]


def __getattr__(name: str) -> Any:
    """Import `make_tiny_pipeline`, which alone needs torch and diffusers, when it is first used (PEP 562)."""
    if name != "make_tiny_pipeline":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .pipeline import make_tiny_pipeline

    return make_tiny_pipeline
