"""Image and video files: open them from a data set's cells, read their headers, decode their frames, write them.

Needs PyAV and Pillow; `media.sample` also needs torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
