"""Placement of a model: precision, quantisation, offload, sharding and context parallelism."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
