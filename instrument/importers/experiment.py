"""The experiment that a converted file becomes: the layers and steps of its hooks, and its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..errors import ConfigError, Problem

EVERYTHING = "**"


@dataclass
class ConvertedExperiment:
    """The result of a conversion.

    Attributes:
        tool: The name of the other tool.
        settings: Root keys of the experiment other than hooks.
        hooks: The hooks by name, as in YAML.
        notes: What has no counterpart or differs, in the order of the source.
    """

    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
        content = {"name": name, **self.settings, "hooks": self.hooks}
        style: dict[str, Any] = {"default_flow_style": None, "sort_keys": False, "width": 120, "allow_unicode": True}
        text: str = yaml.dump(content, Dumper=_Dumper, **style)
        return "\n".join([*lines, text])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library has no types
    """Writes a value that several hooks share to each of them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def layers_containing(pattern: str, where: str) -> str:
    """Return the layer pattern for the names in which a regular expression is found at any position (`re.search`).

    Raises:
        ConfigError: It is not a valid regular expression.
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
    """Return the fields of a hook that acts at the multiples of a number, in [start, stop).

    Returns:
        The fields `every`, `start` and `stop`, without those that have the default value; None if no step is scheduled.

    Raises:
        ConfigError: `every` is not positive.
    """
    if every < 1:
        raise ConfigError(Problem(where, "the number of steps must be at least 1", given=every))
    first = max(0, -(-start // every) * every)
    if stop is not None and first >= stop:
        return None
    fields = {"every": every if every > 1 else None, "start": first or None, "stop": stop}
    return {name: value for name, value in fields.items() if value is not None}
