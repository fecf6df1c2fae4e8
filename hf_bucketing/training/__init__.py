"""Training: data, steps, the loop, checkpoints and validation; what a script of one's own needs is exported here."""

import lazy_loader

from ..configuration import (
    BatchConfig,
    CheckpointConfig,
    HubConfig,
    LoaderConfig,
    ObjectiveConfig,
    ReportingConfig,
    TrainingConfig,
    ValidationConfig,
)

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"loop": ["train"]})
__all__ += [
    "BatchConfig", "CheckpointConfig", "HubConfig", "LoaderConfig", "ObjectiveConfig", "ReportingConfig",
    "TrainingConfig", "ValidationConfig",
]  # fmt: skip
