from .buckets import Buckets as Buckets, BucketStep as BucketStep
from .lengths import Lengths as Lengths, LengthStep as LengthStep
from .own_sizes import PackStep as PackStep
from .packs import Packs as Packs
from .steps import Step as Step
from .way import Batching as Batching
from .ways import make_step as make_step, way_of as way_of
