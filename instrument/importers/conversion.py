"""Conversion of a configuration file of another tool: its fields, none of which is lost without a note, and the experiment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from ..config.spec_file import YAML_ERRORS
from ..errors import ConfigError, Problem
from ..fields.field_types import Dimension

EVERYTHING = "**"
MAX_NUMBERS = 10_000  # of several ranges
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass
class ConvertedExperiment:
    """The result of a conversion."""

    tool: str  # the name of the other tool
    settings: dict[str, Any] = field(default_factory=dict)  # root keys of the experiment other than hooks
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)  # the hooks by name, as in YAML
    notes: list[str] = field(default_factory=list)  # what has no counterpart or differs, in the order of the source

    def note(self, where: str, message: str) -> None:
        """Add a note, unless it exists: the key in the source, and what has no counterpart there or differs."""
        note = " ".join(f"{where}: {message}".split())  # one line, whatever the source contains
        if note not in self.notes:
            self.notes.append(note)

    def statistics(self, given: Iterable[str], names: Mapping[str, str], where: str) -> list[str]:
        """Convert names of statistics. Those without counterpart are noted."""
        for name in given:
            if name not in names:
                self.note(where, f"no counterpart for {name!r}")
        return list(dict.fromkeys(names[name] for name in given if name in names))

    def add_hook(self, name: str, spec: Mapping[str, Any]) -> None:
        """Add a hook. Its name becomes an identifier, with a number if the name is taken."""
        name = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
        name = f"_{name}" if not name or name[0].isdigit() else name
        unique, number = name, 2
        while unique in self.hooks:
            unique, number = f"{name}_{number}", number + 1
        self.hooks[unique] = dict(spec)

    def to_yaml(self, name: str, source: str) -> str:
        """Return the text of the experiment file."""
        lines = [
            "# @package _global_",
            f"# Converted from {' '.join(source.split())} of {self.tool}. In conf/exp, run it with your model and data:",
            f"#   python -m instrument +exp={name} model=... data=...",
            "# In your own loop, pass the file to instrument.attach.",
        ]
        if self.notes:
            lines += ["#", "# Not converted, or different:", *(f"#   {note}" for note in self.notes)]
        # A copy, in which no hooks share a value: YAML would write it once, and refer to it.
        content = json.loads(json.dumps({"name": name, **self.settings, "hooks": self.hooks}))
        style: dict[str, Any] = {"default_flow_style": None, "sort_keys": False, "width": 120, "allow_unicode": True}
        text: str = yaml.safe_dump(content, **style)
        return "\n".join([*lines, text])


def layers_containing(pattern: str, where: str) -> str:
    """Return the layer pattern for the names in which a regular expression is found at any position (`re.search`).

    Raise a ConfigError if it is not a valid regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(Problem(where, f"is not a regular expression: {error}", given=pattern)) from None
    flags = re.match(r"(?:\(\?[aiLmsux]+\))?", pattern)
    start = flags[0] if flags else ""
    body = pattern[len(start) :]
    return f"re:{start}.*(?:{body}).*" if "|" in body else f"re:{start}.*{body}.*"


def layers_with_text(texts: Iterable[str]) -> str:
    """Return the layer pattern for the names that contain one of several texts."""
    escaped = [re.sub(r"([^\w-])", r"\\\1", text) for text in texts]
    return f"re:.*{escaped[0]}.*" if len(escaped) == 1 else f"re:.*({'|'.join(escaped)}).*"


def multiples(every: int, start: int, stop: int | None, where: str) -> dict[str, int] | None:
    """Return the fields of a hook that acts at the multiples of a number in [start, stop), without defaults; None if no step is scheduled.

    Raise a ConfigError if the number, `every`, is not positive.
    """
    if every < 1:
        raise ConfigError(Problem(where, "the number of steps must be at least 1", given=every))
    first = max(0, -(-start // every) * every)
    if stop is not None and first >= stop:
        return None
    fields = {"every": every if every > 1 else None, "start": first or None, "stop": stop}
    return {name: value for name, value in fields.items() if value is not None}


def read_source(path: Path) -> Any:
    """Read a YAML file, or a JSON file (`.json`), which may contain comments. Raise a ConfigError if it cannot be read or is invalid."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(Problem("FILE", f"cannot be read: {error.strerror}", given=str(path))) from None
    except UnicodeDecodeError:
        raise ConfigError(Problem("FILE", "is not a text file in UTF-8", given=str(path))) from None
    is_json = path.suffix.lower() == ".json"
    try:
        if is_json:
            return json.loads(_STRING_OR_COMMENT.sub(lambda match: match[1] or "", text))
        return yaml.safe_load(text)
    except YAML_ERRORS as error:
        message = f"is not valid {'JSON' if is_json else 'YAML'}: {error}"
        raise ConfigError(Problem("FILE", message, given=str(path))) from None


class Fields:
    """The fields of a mapping in the source (empty for None), each of which is taken once. `where`: the key of the mapping.

    Raise a ConfigError if it is not a mapping.
    """

    def __init__(self, value: Any, where: str, experiment: ConvertedExperiment) -> None:
        self.experiment = experiment
        if not isinstance(value, Mapping | None):
            raise ConfigError(Problem(where, "must be a mapping", given=value))
        self.where = where
        self.left = {str(key): item for key, item in (value or {}).items()}

    def key(self, name: str) -> str:
        """Return the key of a field in the source."""
        return f"{self.where}.{name}" if self.where else name

    def note(self, name: str, message: str) -> None:
        """Add a note about a field to the experiment."""
        self.experiment.note(self.key(name), message)

    def note_given(self, messages: Mapping[str, str]) -> None:
        """Take the fields with these names, and add the note of each that has a value."""
        for name, message in messages.items():
            if self.take(name) not in (None, False, "", [], {}):
                self.note(name, message)

    def skip(self, message: str) -> None:
        """Take all fields, and add one note about the mapping."""
        self.left.clear()
        self.experiment.note(self.where, message)

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field; the default if it is missing or null."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def typed(self, name: str, default: Any, kind: Any, wanted: str) -> Any:
        """Return a value of a type, to which Pydantic converts text."""
        value = self.take(name)
        try:
            return default if value is None else TypeAdapter(kind).validate_python(value)
        except ValidationError:
            raise ConfigError(Problem(self.key(name), f"must be {wanted}", given=value)) from None

    def number(self, name: str, default: int | None = None) -> Any:
        """Return a whole number, which may be written as text."""
        return self.typed(name, default, Dimension, "a whole number")

    def flag(self, name: str, default: bool = False) -> Any:
        """Return a boolean, which may be written as text."""
        return self.typed(name, default, bool, "true or false")

    def texts(self, name: str) -> list[str]:
        """Return a list of strings. A string is a list separated by commas."""
        value = self.take(name, [])
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise ConfigError(Problem(self.key(name), "must be a list", given=value))
        return [str(item).strip() for item in items if str(item).strip()]

    def mappings(self, name: str) -> Any:
        """Return a list of mappings."""
        return self.typed(name, [], list[dict[Any, Any]], "a list of mappings")


@contextmanager
def reading(value: Any, where: str, experiment: ConvertedExperiment) -> Iterator[Fields]:
    """Yield the fields of a mapping, and add a note for each that was not taken when the block ends."""
    fields = Fields(value, where, experiment)
    yield fields
    fields.note_given(dict.fromkeys([*fields.left], "no counterpart"))


def read_ranges(value: Any, where: str) -> list[range]:
    """Return the numbers of a list of numbers and ranges such as "3-5", which include both ends.

    Raise a ConfigError if an item is something else, or there are too many numbers.
    """
    ranges = []
    for item in value if isinstance(value, list) else [value]:
        bounds = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(item))
        if bounds is None:
            raise ConfigError(Problem(where, "must contain numbers or ranges such as '3-5'", given=item))
        ranges.append(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    if len(ranges) > 1 and sum(map(len, ranges)) > MAX_NUMBERS:
        raise ConfigError(Problem(where, f"contains more than {MAX_NUMBERS:,} numbers", given=value))
    return ranges
