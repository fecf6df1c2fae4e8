from .config import (
    BatchConfig as BatchConfig,
    LoaderConfig as LoaderConfig,
    ObjectiveConfig as ObjectiveConfig,
    TrainingConfig as TrainingConfig,
)
from .loop import train as train
from .memory.planner import MemoryParts as MemoryParts, MemoryPlan as MemoryPlan, plan_memory as plan_memory
from .settings.adapters import AdapterConfig as AdapterConfig
from .settings.checkpoints import CheckpointConfig as CheckpointConfig
from .settings.hub import HubConfig as HubConfig
from .settings.memory import MemoryConfig as MemoryConfig
from .settings.optimizer import OptimizerConfig as OptimizerConfig
from .settings.plan import PlanConfig as PlanConfig
from .settings.validation import ValidationConfig as ValidationConfig
