"""Configuration of a run: its settings and their parts, what they exclude, and what a resumed run does with them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
