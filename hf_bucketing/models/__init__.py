"""One folder or file per model family: how it is packed, encoded and trained.

To add a family, add a file with a [`Family`][hf_bucketing.packing.family.Family] and an instance of it named `FAMILY`;
to train it, make that a folder whose `recipe.py` has a [`Recipe`][hf_bucketing.models.recipe.Recipe] named `RECIPE`.
"""

from .enable import disable_packing, enable_packing
from .ltx import PackedLTXVideoAttnProcessor
from .verify import VerificationCheck, VerificationReport, verify_packing
from .wan import PackedWanAttnProcessor

__all__ = [
    "PackedLTXVideoAttnProcessor",
    "PackedWanAttnProcessor",
    "VerificationCheck",
    "VerificationReport",
    "disable_packing",
    "enable_packing",
    "verify_packing",
]
