from .buckets import (
    Assignment as Assignment,
    AssignmentRule as AssignmentRule,
    BucketTable as BucketTable,
    CostModel as CostModel,
    CropBox as CropBox,
    ImageSizes as ImageSizes,
    LatentSpec as LatentSpec,
    OpenTable as OpenTable,
    Rejection as Rejection,
    Size as Size,
    cover_resize as cover_resize,
    crop_box as crop_box,
    fitted_ladder as fitted_ladder,
    novelai_ladder as novelai_ladder,
    open_table as open_table,
    token_ladder as token_ladder,
)
from .columns import (
    BucketColumns as BucketColumns,
    ExistingMetadata as ExistingMetadata,
    MediaMetadata as MediaMetadata,
    load_source as load_source,
    map_columns as map_columns,
)
from .errors import (
    BucketingError as BucketingError,
    CacheError as CacheError,
    ColumnError as ColumnError,
    MediaError as MediaError,
    PackingError as PackingError,
    PlanError as PlanError,
)
from .loaders import (
    BucketBatchSampler as BucketBatchSampler,
    BucketCollator as BucketCollator,
    LengthBatchSampler as LengthBatchSampler,
    PackBatchSampler as PackBatchSampler,
    PackCollator as PackCollator,
    PadCollator as PadCollator,
    check_loader as check_loader,
    resume as resume,
    worker_options as worker_options,
)
from .losses import global_mean as global_mean, masked_mse as masked_mse, masked_snr as masked_snr
from .media import ViewRule as ViewRule
from .models import (
    disable_packing as disable_packing,
    enable_packing as enable_packing,
    verify_packing as verify_packing,
)
from .packing import (
    PackedLayout as PackedLayout,
    TokenDrop as TokenDrop,
    packed_forward as packed_forward,
    packed_mse as packed_mse,
    packed_vlb as packed_vlb,
)
from .streaming import StreamingBucketBatcher as StreamingBucketBatcher

__version__: str
