from .compilation import compile_blocks as compile_blocks
from .enable import disable_packing as disable_packing, enable_packing as enable_packing
from .families.ltx import PackedLTXVideoAttnProcessor as PackedLTXVideoAttnProcessor
from .families.wan import PackedWanAttnProcessor as PackedWanAttnProcessor
from .verify import (
    VerificationCheck as VerificationCheck,
    VerificationReport as VerificationReport,
    verify_packing as verify_packing,
)
