"""The experiment that a converted file becomes, and its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..spec.parse import parse_hooks, parse_rules

MOST_LETTERS = 120  # of a line of the file


@dataclass(frozen=True)
class Note:
    """What an experiment does not take over, or takes over with a difference.

    Attributes:
        where: The key in the source.
        message: What is missing or different.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return " ".join(f"{self.where}: {self.message}".split())  # one line, whatever the source contains


@dataclass
class Experiment:
    """The result of a conversion.

    Attributes:
        tool: The name of the other tool.
        settings: Root keys of the experiment other than hooks and rules.
        hooks: The hooks by name, as in YAML.
        rules: The rules by name, as in YAML.
        notes: What has no counterpart or differs, in the order of the source.
    """

    tool: str
    settings: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, dict[str, Any]] = field(default_factory=dict)
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def note(self, where: str, message: str) -> None:
        """Add a note, unless it exists."""
        if (note := Note(where, message)) not in self.notes:
            self.notes.append(note)

    def statistics(self, given: Iterable[str], names: Mapping[str, str], where: str) -> list[str]:
        """Convert names of statistics. Those without counterpart are noted.

        Args:
            given: The names in the source.
            names: The counterparts.
            where: The key in the source.
        """
        for name in given:
            if name not in names:
                self.note(where, f"no counterpart for {name!r}")
        return list(dict.fromkeys(names[name] for name in given if name in names))

    def add_hook(self, name: str, spec: Mapping[str, Any]) -> str:
        """Add a hook and return its name, which gets a number if it is taken."""
        return _add(self.hooks, name, spec)

    def add_rule(self, name: str, spec: Mapping[str, Any]) -> str:
        """Add a rule and return its name, which gets a number if it is taken."""
        return _add(self.rules, name, spec)

    def check(self) -> None:
        """Check the hooks and rules.

        Raises:
            ConfigError: A value of the source is not allowed in a hook or rule.
        """
        parse_hooks(self.hooks)
        parse_rules(self.rules)

    def to_yaml(self, name: str, source: str) -> str:
        """Return the text of the experiment file.

        Args:
            name: The name of the experiment, which is also the name of the file without its suffix.
            source: The name of the converted file.
        """
        lines = [
            "# @package _global_",
            f"# Converted from {' '.join(source.split())} of {self.tool}. In conf/exp, run it with your model and data:",
            f"#   python -m instrument +exp={name} model=... data=...",
            "# In your own loop, pass the file to instrument.attach.",
        ]
        if self.notes:
            lines += ["#", "# Not converted, or different:", *(f"#   {note}" for note in self.notes)]
        lines += [f"{key}: {_flow(value)}" for key, value in {"name": name, **self.settings}.items()]
        for section, specs in (("hooks", self.hooks), ("rules", self.rules)):
            if specs or section == "hooks":
                lines += [f"{section}:" if specs else f"{section}: {{}}", *(_entry(*item) for item in specs.items())]
        return "\n".join(lines) + "\n"


def identifier(text: str) -> str:
    """Return a name of a hook or rule: letters, digits and underscores, not starting with a digit."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return f"_{name}" if not name or name[0].isdigit() else name


def _add(specs: dict[str, dict[str, Any]], name: str, spec: Mapping[str, Any]) -> str:
    unique, number = identifier(name), 2
    while unique in specs:
        unique, number = f"{identifier(name)}_{number}", number + 1
    specs[unique] = dict(spec)
    return unique


def _entry(name: str, spec: Mapping[str, Any]) -> str:
    """Return a hook or rule in flow style: in the line of its name, or in the lines below it."""
    fields = [f"{key}: {_flow(value)}" for key, value in spec.items()]
    line = f"  {name}: {{{', '.join(fields)}}}"
    if len(line) <= MOST_LETTERS:
        return line
    lines = [f"    {{{fields[0]}"]
    for each in fields[1:]:
        if len(lines[-1]) + len(each) + 3 > MOST_LETTERS:
            lines[-1] += ","
            lines.append(f"     {each}")
        else:
            lines[-1] += f", {each}"
    return "\n".join([f"  {name}:", *lines]) + "}"


def _flow(value: Any) -> str:
    """Return a value as it is written inside of `{}`."""
    text: str = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)
    return text.strip()[1:-1]
