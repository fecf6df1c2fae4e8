"""Generated media and small pipelines, for the demo and for tests without a hub."""

from typing import TYPE_CHECKING, Any

from .media import DEMO_CLIPS, Clip, make_media_dataset, render

if TYPE_CHECKING:
    from .demo import make_demo_pipeline
    from .pipeline import make_tiny_pipeline

__all__ = ["DEMO_CLIPS", "Clip", "make_demo_pipeline", "make_media_dataset", "make_tiny_pipeline", "render"]


def __getattr__(name: str) -> Any:
    """Import what needs torch and diffusers when it is first used (PEP 562)."""
    if name == "make_demo_pipeline":
        from .demo import make_demo_pipeline

        return make_demo_pipeline
    if name == "make_tiny_pipeline":
        from .pipeline import make_tiny_pipeline

        return make_tiny_pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
