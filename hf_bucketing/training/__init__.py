"""Training: settings, data, steps, the loop, checkpoints, adapters, validation and logs."""

from .adapters import AdapterConfig
from .checkpoint import CheckpointConfig
from .config import BatchConfig, LoaderConfig, ObjectiveConfig, TrainingConfig
from .hub import HubConfig
from .loop import train
from .memory.config import MemoryConfig
from .memory.planner import MemoryParts, MemoryPlan, PlanConfig, plan_memory
from .optimizers import OptimizerConfig
from .validation import ValidationConfig

__all__ = [
    "AdapterConfig",
    "BatchConfig",
    "CheckpointConfig",
    "HubConfig",
    "LoaderConfig",
    "MemoryConfig",
    "MemoryParts",
    "MemoryPlan",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PlanConfig",
    "TrainingConfig",
    "ValidationConfig",
    "plan_memory",
    "train",
]
