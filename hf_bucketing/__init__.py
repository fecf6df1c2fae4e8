"""Fine-tune diffusion transformers on images and videos of every size and length, at their own shape.

Everything that the README's examples use is importable from here. Sizes, bucket tables and plans need numpy alone; the
other names are loaded with torch, datasets, accelerate or diffusers when they are first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
