"""Settings as frozen dataclasses: checked against their types, documented once, flattened and built again.

A configuration such as `TrainingConfig` is composed of the values that it configures (`ViewRule`, `OptimizerConfig`,
…). On the command line, in JSON files and in checkpoints it is flat: one name per setting, whatever value holds it.

What holds for a setting beside its value is metadata of its field, or of the field of the part that has it:

| key | value |
|---|---|
| `argument` | name of a function's argument that is this setting, for messages |
| `parse` | function that reads the text of its flag |
| `flag` | False if no script takes it, `"listed"` if only a list of configurations in a file does |
| `common` | True if the short help of scripts shows its flag |
| `infinite` | True if it may be infinity, as a limit that nothing reaches |
| `one_of` | name of a choice among settings, of which one is given |
| `on_resume` | what a resumed run does about another value; `configuration/on_resume.py` lists the rules |
| `decides_steps` | True if the number of optimizer steps follows from it |
| `left_open` | value that lets a run choose: a resumed run takes the choice of the saved run |
| `needs_rows` | why rows from a stream cannot have it |
| `batching` | the ways of batching that use it; all if it is not there |
| `planned` | False if neither memory nor time of a plan depends on it |
| `chosen` | True if a suggestion chooses it, or does without |
| `encoded` | what of a cache it would change: `"media"` or `"captions"` |
| `held_out` | its value on held-out samples, of which nothing is random |
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
from collections.abc import Hashable, Iterator, Mapping
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import BucketingError, did_you_mean, quoted

Config = TypeVar("Config")

_ENTRY = re.compile(r"    (\w+) \(.*?\): (.*)")
_LINK = re.compile(r"\[(`[^`]+`)\](?:\[[^\]]*\])?")


class Setting(NamedTuple):
    """One setting of a configuration.

    Attributes:
        name (`str`): Name, which no other setting of the configuration has.
        hint (type): Type, as annotated.
        default (any): Default, or `dataclasses.MISSING`.
        help (`str`): Its entry under `Args:` in the docstring of its dataclass, without links.
        metadata (mapping): `metadata` of its field, and of those of the parts that lead to it.
        owner (type): Dataclass that declares it.
        path (`tuple` of `str`): Fields that lead from the configuration to the value that holds it.
    """

    name: str
    hint: Any
    default: Any
    help: str
    metadata: Mapping[str, Any]
    owner: type
    path: tuple[str, ...]


def setting(default: Any, **metadata: Any) -> Any:
    """Return the field of a setting with a default, and what holds for it (the keys are those of this module)."""
    return dataclasses.field(default=default, metadata=metadata)


def part(kind: type, **metadata: Any) -> Any:
    """Return the field of a part of a configuration, and what holds for all its settings that do not say otherwise."""
    return dataclasses.field(default_factory=kind, metadata=metadata)


def settings_in(kind: type, *, default: Any = dataclasses.MISSING) -> Iterator[Setting]:
    """Iterate over the settings of a dataclass and of its parts; an instance's values become their defaults."""
    hints, texts = _hints(kind), _entries(kind)
    for field in dataclasses.fields(kind):
        value = getattr(default, field.name) if isinstance(default, kind) else _default(field)
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            for setting in settings_in(hint, default=value):  # type: ignore[arg-type]
                metadata = {**field.metadata, **setting.metadata}
                yield setting._replace(metadata=metadata, path=(field.name, *setting.path))
        else:
            yield Setting(field.name, hint, value, texts.get(field.name, ""), field.metadata, kind, ())


def flatten(config: Any) -> dict[str, Any]:
    """Return the settings of a configuration by name, as plain values."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def build(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Build a configuration from its settings by name; settings that are not given keep their defaults.

    Raises:
        BucketingError: If there is no setting of a given name, a number is not finite, or the configuration refuses a
            value.
    """
    check_names(kind, values)
    hints, arguments = _hints(cast(Any, kind)), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            default = _default(field)
            inherited = {} if default is dataclasses.MISSING else flatten(default)
            group_values = {name: values[name] for name in names_of(hint) if name in values}  # type: ignore[arg-type]
            arguments[field.name] = build(hint, {**inherited, **group_values})  # type: ignore[arg-type]
        elif field.name in values:
            arguments[field.name] = _finite(field, values[field.name])
    return kind(**arguments)


def _finite(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value of a setting; raise BucketingError if it is, or contains, a number that is not finite."""
    refused = math.isnan if field.metadata.get("infinite") else lambda number: not math.isfinite(number)
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, float) and refused(number):
            raise BucketingError(f"`{field.name}` must be a finite number, got {number}.")
    return value


def chosen_config(
    kind: type[Config], config: Config | None, *, error: type[BucketingError], **settings: object
) -> Config:
    """Return a value that was given whole, as `config`, or by keywords of which those that are None are not given.

    Raises:
        BucketingError: As `error`, if both are given, or `config` is of another kind.
    """
    chosen = {name: value for name, value in settings.items() if value is not None}
    if config is None:
        return kind(**chosen)
    if not isinstance(config, kind):
        raise error(f"`config` must be a {kind.__name__}, got {config!r}.")
    if chosen:
        raise error(f"`config` holds {quoted([*chosen])} already: set them there, or omit `config`.")
    return config


def changed(config: Config, **values: Any) -> Config:
    """Return a configuration with other values of some settings, given by name.

    Raises:
        BucketingError: As [`build`].
    """
    return build(type(config), {**flatten(config), **values})


def names_of(kind: type) -> list[str]:
    """Return the names of all settings of a configuration."""
    return [setting.name for setting in settings_in(kind)]


def flag_names(kind: type) -> list[str]:
    """Return the names of the settings of a configuration that are flags of scripts."""
    return [setting.name for setting in settings_in(kind) if "flag" not in setting.metadata]


def not_default(config: Any, *names: str) -> list[str]:
    """Return which of the named settings differ from their defaults."""
    values = flatten(config)
    defaults = {setting.name: setting.default for setting in settings_in(type(config))}
    return [name for name in names if values[name] != defaults[name]]


def changed_settings(config: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by name."""
    values = flatten(config)
    return {name: values[name] for name in not_default(config, *values)}


def marked(kind: type, key: str) -> dict[str, Any]:
    """Return the settings of a configuration that have a key in their metadata, by name, each with its value."""
    return {setting.name: setting.metadata[key] for setting in settings_in(kind) if key in setting.metadata}


def check_literals(config: Any, *, error: type[BucketingError] = BucketingError) -> None:
    """Check every field that is annotated as a `Literal`, or as one or None.

    Raises:
        BucketingError: If a field has a value that its annotation does not list.
    """
    for name, hint in _hints(cast(Any, type(config))).items():
        allowed, value = choices(hint), getattr(config, name)
        if allowed is not None and value not in allowed and not (value is None and type(None) in get_args(hint)):
            listed = ", ".join(f'"{choice}"' for choice in allowed)
            raise error(f"`{name}` must be one of {listed}, got {value!r}.")


def check_types(config: Any, *, error: type[BucketingError] = BucketingError) -> None:
    """Check the values of a frozen dataclass against their annotations, and make its numbers plain.

    A whole number becomes an `int`, whatever its type, so that equal settings look alike in saved states.

    Raises:
        BucketingError: If a setting is not of its type, or a number is not finite.
    """
    for name, hint in _hints(cast(Any, type(config))).items():
        value, kinds = getattr(config, name), parts_of(hint)
        if value is None and type(None) in get_args(hint):
            continue
        if get_origin(kinds[-1]) is Mapping and isinstance(value, Mapping):
            value = numbers_by_id(value, name, integer=True, error=error)
        elif int in kinds or float in kinds:
            value = plain_number(value, name, integer=float not in kinds, error=error)
        elif kinds == [bool]:
            value = plain_bool(value, name, error=error)
        object.__setattr__(config, name, value)
    check_literals(config, error=error)


def plain_number(value: Any, name: str, *, integer: bool, error: type[BucketingError] = BucketingError) -> Any:
    """Return a finite number as an `int` if it is whole, else as a `float`; raise an error for anything else."""
    number = value.item() if hasattr(value, "item") and getattr(value, "shape", None) == () else value
    valid = isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)
    if valid and number == int(number):
        return int(number)
    if not valid or integer:
        raise error(f"`{name}` must be a {'whole' if integer else 'finite'} number, got {value!r}.")
    return float(number)


def plain_bool(value: Any, name: str, *, error: type[BucketingError] = BucketingError) -> bool:
    """Return True or False, also of numpy; raise an error for anything else."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise error(f"`{name}` must be True or False, got {value!r}.")
    return bool(value)


def numbers_by_id(
    values: Mapping[Any, Any], name: str, *, integer: bool, error: type[BucketingError] = BucketingError
) -> dict[int, Any]:
    """Return a mapping of bucket ids to numbers with plain keys, sorted, and values; raise an error for any other."""
    for key in values:
        if isinstance(key, str) or plain_number(key, f"a key of {name}", integer=False, error=error) % 1:
            raise error(f"`{name}` maps ids of buckets, whole numbers, got the key {key!r}; give JSON keys as int.")
    plain = ((int(key), plain_number(values[key], f"{name}[{key}]", integer=integer, error=error)) for key in values)
    return dict(sorted(plain))


def number_or_text(text: str) -> float | str:
    """Return the value of a flag that is a number or a text."""
    try:
        return float(text)
    except ValueError:
        return text


def check_at_least(smallest: int, config: Any, *names: str, error: type[BucketingError] = BucketingError) -> None:
    """Raise an error if a named field is neither None nor at least `smallest`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise error(f"`{name}` must be at least {smallest}, got {value}.")


def check_shares(config: Any, *names: str) -> None:
    """Raise BucketingError if a named field is neither None nor from 0 to 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise BucketingError(f"`{name}` must be from 0 to 1, got {value}.")


def choices(hint: Any) -> tuple[Any, ...] | None:
    """Return the values of a type that consists of `Literal`s, None aside; None for other types."""
    literals = [part for part in parts_of(hint) if get_origin(part) is Literal]
    return tuple(value for part in literals for value in get_args(part)) if literals == parts_of(hint) else None


def parts_of(hint: Any) -> list[Any]:
    """Return the members of a union without None, or the type itself."""
    if get_origin(hint) not in (Union, types.UnionType):
        return [hint]
    return [part for part in get_args(hint) if part is not type(None)]


def explains_names(kind: type[Config]) -> type[Config]:
    """Make a dataclass say where a setting belongs that its constructor does not take; a class decorator."""
    construct: Any = kind.__init__
    fields = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    @functools.wraps(construct)
    def explain_or_construct(self: Config, **values: Any) -> None:
        for name in values.keys() - fields:
            check_names(kind, [name])
            (setting,) = (setting for setting in settings_in(kind) if setting.name == name)
            raise BucketingError(
                f"`{name}` belongs to a part of {kind.__name__}: give {setting.path[0]}="
                f"{setting.owner.__name__}({name}=…), or use {kind.__name__}.from_flat, which takes all settings by "
                "name."
            )
        construct(self, **values)

    setattr(kind, "__init__", explain_or_construct)  # noqa: B010 (mypy refuses to assign it)
    return kind


def check_names(kind: type, names: Any) -> None:
    """Raise BucketingError if a name is not that of a setting; the message names the most similar one."""
    known = names_of(kind)
    for name in [name for name in names if name not in known]:
        raise BucketingError(f"{kind.__name__} has no setting {name}{did_you_mean(name, known)}")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _entries(kind: type) -> dict[str, str]:
    """Return the text of each entry under `Args:` in the docstrings of a dataclass and of those that it extends."""
    entries: dict[str, str] = {}
    for extended in reversed(kind.__mro__[:-1]):
        name = None
        for line in inspect.cleandoc(extended.__doc__ or "").partition("\nArgs:\n")[2].splitlines():
            if line and not line.startswith("    "):
                break
            if entry := _ENTRY.fullmatch(line):
                name, entries[entry[1]] = entry[1], entry[2]
            elif name is not None and line.strip():
                entries[name] += f" {line.strip()}"
    return {name: without_links(text) for name, text in entries.items()}


def without_links(text: str) -> str:
    """Return a docstring's text with names in place of links to their documentation."""
    return _LINK.sub(r"\1", text)
