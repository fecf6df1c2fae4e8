"""One folder or file per model family: how it is packed, encoded and trained."""

from .enable import disable_packing, enable_packing
from .ltx.processor import PackedLTXVideoAttnProcessor
from .verify import VerificationCheck, VerificationReport, verify_packing
from .wan.processor import PackedWanAttnProcessor

__all__ = [
    "PackedLTXVideoAttnProcessor",
    "PackedWanAttnProcessor",
    "VerificationCheck",
    "VerificationReport",
    "disable_packing",
    "enable_packing",
    "verify_packing",
]
