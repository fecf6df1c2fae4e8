from .batches import BatchConfig as BatchConfig
from .checkpoints import CheckpointConfig as CheckpointConfig
from .hub import HubConfig as HubConfig
from .loader import LoaderConfig as LoaderConfig
from .objective import ObjectiveConfig as ObjectiveConfig
from .reporting import ReportingConfig as ReportingConfig
from .run import TrainingConfig as TrainingConfig
from .validation import ValidationConfig as ValidationConfig
