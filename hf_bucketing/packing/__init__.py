"""Run samples of different sizes as one packed sequence through a stock diffusers transformer.

No model family is known here; those are in `hf_bucketing.models`, with `enable_packing`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
