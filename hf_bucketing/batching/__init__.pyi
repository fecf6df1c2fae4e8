from .buckets import Buckets as Buckets, BucketStep as BucketStep
from .own_sizes import Lengths as Lengths, LengthStep as LengthStep, Packs as Packs, PackStep as PackStep
from .steps import Step as Step
from .way import Batching as Batching
from .ways import make_step as make_step, way_of as way_of
