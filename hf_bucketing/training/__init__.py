"""What the training scripts share: recipes per model family, objectives, checkpoints, and the loop (accelerate)."""

from .config import TrainingConfig
from .loop import train

__all__ = ["TrainingConfig", "train"]
