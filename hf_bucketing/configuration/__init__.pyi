from .batches import BatchConfig as BatchConfig
from .evaluation import ValidationConfig as ValidationConfig
from .loader import LoaderConfig as LoaderConfig
from .objective import ObjectiveConfig as ObjectiveConfig
from .outputs import CheckpointConfig as CheckpointConfig, HubConfig as HubConfig, ReportingConfig as ReportingConfig
from .run import TrainingConfig as TrainingConfig
