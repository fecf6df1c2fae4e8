"""The errors that users meet: each says what was expected, what was got, and what to do."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


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


def refuse_old_names(**new_names: str) -> Callable[[Class], Class]:
    """Decorate a class whose keyword arguments were renamed: an old name raises an error that says the new one.

    Args:
        **new_names (`str`): The new name of each old one.
    """

    def decorate(cls: Class) -> Class:
        init: Any = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def checked(self: object, *args: object, **options: object) -> None:
            for old in options.keys() & new_names.keys():
                raise BucketingError(f"{cls.__name__} takes {new_names[old]} where it took {old}; use the new name.")
            init(self, *args, **options)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
