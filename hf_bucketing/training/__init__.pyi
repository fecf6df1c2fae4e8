from ..configuration import (
    BatchConfig as BatchConfig,
    CheckpointConfig as CheckpointConfig,
    HubConfig as HubConfig,
    LoaderConfig as LoaderConfig,
    ObjectiveConfig as ObjectiveConfig,
    ReportingConfig as ReportingConfig,
    TrainingConfig as TrainingConfig,
    ValidationConfig as ValidationConfig,
)
from .loop import train as train
