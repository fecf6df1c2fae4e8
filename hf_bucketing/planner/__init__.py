"""Memory that a run needs, from its configurations alone, before it starts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
