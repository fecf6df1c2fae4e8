"""Training: settings, data, steps, the loop, checkpoints, adapters, validation and logs."""

from .adapters import AdapterConfig
from .checkpoint import CheckpointConfig
from .config import BatchConfig, LoaderConfig, ObjectiveConfig, TrainingConfig
from .loop import train
from .memory.config import MemoryConfig
from .optimizers import OptimizerConfig
from .validation import ValidationConfig

__all__ = [
    "AdapterConfig",
    "BatchConfig",
    "CheckpointConfig",
    "LoaderConfig",
    "MemoryConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "train",
]
