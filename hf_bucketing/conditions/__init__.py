"""What a sample is shown beside its pixels and its caption: conditions, their rules, rows and draws."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
