"""The errors that users meet: each says what was expected, what was got, and what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

Target = TypeVar("Target", bound=Callable[..., Any])

_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")
_QUOTE = '"'
_OF_WORKER = re.compile(r"Caught \w+ in DataLoader worker process.*\n(?:\w+\.)*\w+: (.*)", re.DOTALL)


class BucketingError(ValueError):
    """Base class of every error that hf_bucketing raises about its input.

    A message names arguments in backquotes, with or without a value: `` `max_tokens` `` or `` `oversize="drop"` ``.
    Scripts show them as their flags.

    Args:
        message (`str`): What was expected and what was got; and what to do, if there is one thing.
        advice (sequence of `str`): Several things to do, each a clause that follows "or". A script leaves out what it
            has no flag for.

    Example:
        >>> error = BucketingError("It takes 90 tokens.", advice=["raise `max_tokens`", 'give `oversize="drop"`'])
        >>> print(error)
        It takes 90 tokens. Raise `max_tokens`, or give `oversize="drop"`.
        >>> print(error.in_flags({"max_tokens": "--max_tokens"}))
        It takes 90 tokens. Raise --max_tokens.
    """

    def __init__(self, message: str = "", *, advice: Sequence[str] = ()) -> None:
        super().__init__(_with_advice(message, advice))
        self.fact = message
        self.advice = tuple(advice)

    def in_flags(self, flags: Mapping[str, str]) -> str:
        """Return the message with flags in place of arguments; `flags` maps one to the other."""
        advice = [clause for clause in self.advice if all(name in flags for name, _ in _ARGUMENT.findall(clause))]
        message = _with_advice(self.fact, advice)
        if of_worker := _OF_WORKER.match(message):
            message = of_worker[1].strip()

        def in_flag(match: re.Match[str]) -> str:
            name, value = match.groups()
            if name not in flags:
                return match[0]
            return flags[name] if value in (None, "True") else f"{flags[name]} {value.strip(_QUOTE)}"

        return _ARGUMENT.sub(in_flag, message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar one, if there is one."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "."


def quoted(names: Sequence[str]) -> str:
    """Return the names of arguments as messages write them."""
    return ", ".join(f"`{name}`" for name in names)


def _with_advice(message: str, advice: Sequence[str]) -> str:
    clauses = ", or ".join(advice)
    return f"{message} {clauses[0].upper()}{clauses[1:]}." if clauses else message


class ColumnError(BucketingError):
    """A data set lacks a needed column, or already holds one that would be written."""


class RowsError(BucketingError):
    """Rows of a data set are at fault in several ways; the message has a line for each.

    Args:
        message (`str`): Message, by default those of the errors.
        errors (sequence of [`BucketingError`]): One for each way.
    """

    def __init__(self, message: str = "", *, errors: Sequence[BucketingError] = ()) -> None:
        super().__init__(message or "\n".join(map(str, errors)))
        self.errors = tuple(errors)

    def in_flags(self, flags: Mapping[str, str]) -> str:
        """Return the message with flags in place of arguments; `flags` maps one to the other."""
        lines = [error.in_flags(flags) for error in self.errors]
        return "\n".join(lines) if lines else BucketingError.in_flags(self, flags)


class MediaError(BucketingError):
    """An image or video file is missing, empty, corrupt, shorter than its metadata promised or cannot be encoded."""


class CacheError(BucketingError):
    """An entry of a latent or text cache is missing, corrupt, not finite or of another model."""


class PlanError(BucketingError):
    """An epoch cannot be planned: no usable sample, or one that fits no batch."""


class OversizeError(PlanError):
    """A sample exceeds the limit of a batch by itself.

    Attributes:
        row (`int`, *optional*): Number of its row, which the message begins with, if it is known.
    """

    row: int | None = None


class PackingError(BucketingError):
    """Samples, texts and timesteps do not make a pack, or a model cannot run one."""


class FlagError(BucketingError):
    """A script was called with flags that it does not have, or that do not go together."""


class HubError(BucketingError):
    """A model or data set cannot be had from the Hugging Face hub, or nothing can be uploaded to it."""


class WriteError(BucketingError):
    """A file cannot be written, for lack of space or permission."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or another signal to stop; its message says how to continue.

    Args:
        message (`str`): How to continue.
        number (`int`): Number of the signal.
    """

    def __init__(self, message: str = "", number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


def explains_arguments(error: type[BucketingError] = BucketingError, /, **others: str) -> Callable[[Target], Target]:
    """Decorate a class or function so that an unknown keyword argument raises an error that says what to write.

    That is the configuration that has a setting of the name, or the argument whose name is most similar.

    Args:
        error (subclass of `BucketingError`): The error to raise.
        **others (`str`): What to write in place of names that belong to a value which is passed.
    """

    def decorate(target: Target) -> Target:
        call: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        known = inspect.signature(call).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

        @functools.wraps(call)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options.keys() & others.keys():
                raise error(f"{target.__name__} takes {others[name]} in place of {name}.")
            for name in () if takes_any else options.keys() - known.keys():
                for kind in get_args(get_type_hints(call)["config"]) if "config" in known else ():
                    if name in getattr(kind, "__dataclass_fields__", ()):
                        raise error(f"{target.__name__} takes {name} in its configuration: config={kind.__name__}(…).")
                raise error(f"{target.__name__} has no argument {name}{did_you_mean(name, known)}")
            return call(*args, **options)

        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate
