from .batches import BatchConfig as BatchConfig, LoaderConfig as LoaderConfig
from .objective import ObjectiveConfig as ObjectiveConfig
from .outputs import (
    CheckpointConfig as CheckpointConfig,
    HubConfig as HubConfig,
    ReportingConfig as ReportingConfig,
    ValidationConfig as ValidationConfig,
)
from .run import TrainingConfig as TrainingConfig
