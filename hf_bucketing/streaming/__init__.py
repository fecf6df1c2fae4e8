"""Batches from streams, and their resume."""

from .batcher import StreamingBucketBatcher
from .grouping import BucketGrouping, PackGrouping
from .resume import ResumableStream

__all__ = ["BucketGrouping", "PackGrouping", "ResumableStream", "StreamingBucketBatcher"]
