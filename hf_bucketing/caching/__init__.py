"""Latents and texts on disk: keys, entries, the job that encodes them and the collator that reads them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
