from .enable import disable_packing as disable_packing, enable_packing as enable_packing
from .ltx import PackedLTXVideoAttnProcessor as PackedLTXVideoAttnProcessor
from .verify import (
    VerificationCheck as VerificationCheck,
    VerificationReport as VerificationReport,
    verify_packing as verify_packing,
)
from .wan import PackedWanAttnProcessor as PackedWanAttnProcessor
