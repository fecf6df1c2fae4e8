"""One folder per model family: how it is packed, encoded and trained.

To add a family, see docs/models/adding-a-model.md.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
