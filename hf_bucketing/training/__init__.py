"""Training: data, steps, the loop, checkpoints and validation; what a script of one's own needs is exported here."""

import lazy_loader

from .. import configuration
from ..configuration import *  # noqa: F403

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"loop": ["train"]})
__all__ += configuration.__all__
