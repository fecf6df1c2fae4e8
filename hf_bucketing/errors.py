"""The errors that users meet: each says what was expected, what was got, and what to do."""

import sys
from collections.abc import Callable


class BucketingError(ValueError):
    """Base class of every error that hf_bucketing raises about its input."""


class ColumnError(BucketingError):
    """A data set lacks a needed column, or already holds one that would be written."""


class MediaError(BucketingError):
    """An image or video file is missing, empty, corrupt or shorter than its metadata promised."""


class CacheError(BucketingError):
    """An entry of a latent or text cache is missing, corrupt or of another model."""


class PlanError(BucketingError):
    """An epoch cannot be planned: no usable sample, or one that fits no batch."""


class PackingError(BucketingError):
    """Samples, texts and timesteps do not make a pack, or a model cannot run one."""


def exit_with_message(main: Callable[[], None]) -> None:
    """Run the main function of a script; a `BucketingError` ends it with its message instead of a traceback."""
    try:
        main()
    except BucketingError as error:
        sys.exit(f"{type(error).__name__}: {error}")
