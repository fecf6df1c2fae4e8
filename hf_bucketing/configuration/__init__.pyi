from .checkpoints import CheckpointConfig as CheckpointConfig
from .hub import HubConfig as HubConfig
from .reporting import ReportingConfig as ReportingConfig
from .run import (
    BatchConfig as BatchConfig,
    LoaderConfig as LoaderConfig,
    ObjectiveConfig as ObjectiveConfig,
    TrainingConfig as TrainingConfig,
)
from .validation import ValidationConfig as ValidationConfig
