from .config import (
    BatchConfig as BatchConfig,
    LoaderConfig as LoaderConfig,
    ObjectiveConfig as ObjectiveConfig,
    TrainingConfig as TrainingConfig,
)
from .loop import train as train
from .settings.checkpoints import CheckpointConfig as CheckpointConfig
from .settings.hub import HubConfig as HubConfig
from .settings.reporting import ReportingConfig as ReportingConfig
from .settings.validation import ValidationConfig as ValidationConfig
