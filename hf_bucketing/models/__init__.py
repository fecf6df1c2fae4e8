"""One folder or file per model family: how it is packed, encoded and trained.

To add a family, add a file with a [`Family`][hf_bucketing.packing.family.Family] and an instance of it named `FAMILY`;
to train it, make that a folder whose `recipe.py` has a [`Recipe`][hf_bucketing.models.recipe.Recipe] named `RECIPE`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
