"""Ways of batching: what a run does otherwise in buckets, in packs, and in batches of similar length."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
