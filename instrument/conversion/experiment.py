"""The experiment that a converted file becomes, and its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class Experiment:
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

    def add_hook(self, name: str, spec: Mapping[str, Any]) -> None:
        """Add a hook. Its name becomes an identifier, with a number if the name is taken."""
        name = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
        name = f"_{name}" if not name or name[0].isdigit() else name
        unique, number = name, 2
        while unique in self.hooks:
            unique, number = f"{name}_{number}", number + 1
        self.hooks[unique] = dict(spec)

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
        content = {"name": name, **self.settings, "hooks": self.hooks}
        style: dict[str, Any] = {"default_flow_style": None, "sort_keys": False, "width": 120, "allow_unicode": True}
        text: str = yaml.dump(content, Dumper=_Dumper, **style)
        return "\n".join([*lines, text])


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the library has no types
    """Writes a value that several hooks share to each of them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True
