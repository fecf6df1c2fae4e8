"""Training: settings, data, steps, the loop, checkpoints, adapters, validation and logs."""

from .adapters import AdapterConfig
from .checkpoint import CheckpointConfig
from .config import BatchConfig, LoaderConfig, ObjectiveConfig, TrainingConfig
from .loop import train
from .optimizers import OptimizerConfig
from .validation import ValidationConfig

__all__ = [
    "AdapterConfig",
    "BatchConfig",
    "CheckpointConfig",
    "LoaderConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "train",
]
