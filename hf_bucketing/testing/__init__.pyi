from .demo import make_demo_pipeline as make_demo_pipeline
from .media import DEMO_CLIPS as DEMO_CLIPS, Clip as Clip, make_media_dataset as make_media_dataset, render as render
from .pipeline import make_tiny_pipeline as make_tiny_pipeline
