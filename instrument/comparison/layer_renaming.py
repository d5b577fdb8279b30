"""Layers that have other names in another run: mappings with patterns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.globs import ROOT
from ..formatting import shorten


def renamed_layers(rename: Mapping[str, str], layers: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return the name that each layer has in another run.

    An entry renames a layer and everything inside it. `*` is one segment of a name or a part of it, and `**` is any
    number of segments; the new name contains the same wildcards. `.` is the root. If several entries match a layer,
    the one with the most segments counts.

    Args:
        rename: Names in this run and in the other run, such as `{"encoder": "backbone", "h.*.mlp": "blocks.*.ffn"}`.

    Raises:
        ConfigError: An entry is invalid, matches no layer, or leads to no layer of the other run; or two layers get the
            same name.
    """
    names = dict(zip(layers, layers, strict=True))
    used: dict[str, list[str]] = {old: [] for old in rename}  # the new names that each entry makes
    rules = [(old, pattern_of(old, new), new) for old, new in rename.items()]
    for layer in layers:
        dotted = f"{layer}." if layer else ""  # each segment of a pattern can match its own dot
        matching = [(old, match, new) for old, pattern, new in rules if (match := pattern.fullmatch(dotted))]
        if matching:
            old, match, new = max(matching, key=lambda rule: 0 if rule[0] == ROOT else rule[0].count(".") + 1)
            names[layer] = replaced(new, match)
            used[old].append(names[layer])
    own, theirs = ([layer or ROOT for layer in side] for side in (layers, others))
    problems = []
    for old, new in rename.items():
        where = f"rename {old}={new}"
        if not used[old]:
            message = "matches no recorded layer of A, or only layers that a longer entry renames"
            problems.append(Problem(where, message, old, shorten(own), similar_names(old, own)))
        elif not set(used[old]) & set(others):
            message, wrong = "no recorded layer of B has the new name", used[old][0]
            problems.append(Problem(where, message, wrong, shorten(theirs), similar_names(wrong, theirs)))
    raise_problems(problems)
    taken, known = Counter(names.values()), {*others}
    if twice := [name for name in names.values() if taken[name] > 1 and name in known]:
        same = ", ".join(layer or ROOT for layer, name in names.items() if name == twice[0])
        raise ConfigError(Problem("rename", f"several layers of A get the name {twice[0] or ROOT}", same))
    return names


def pattern_of(old: str, new: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: one group for each wildcard, and one for the rest of the name."""
    wildcards = _WILDCARD.findall(old)
    if wildcards != _WILDCARD.findall(new):
        message = "both names must contain the same wildcards, in the same order"
        raise ConfigError(Problem(f"rename {old}={new}", message, new, ", ".join(wildcards) or "no wildcards"))
    if not all([old, new, *old.split(".")[1:], *new.split(".")[1:]]) and ROOT not in (old, new):
        raise ConfigError(Problem(f"rename {old}={new}", "a name has an empty segment", fix="'.' is the root module"))
    segments = [] if old == ROOT else old.split(".")
    parts = [
        r"((?:[^.]+\.)*)" if each == "**" else re.escape(each).replace(r"\*", "([^.]*)") + r"\." for each in segments
    ]
    return re.compile("".join(parts) + "(.*)")


_WILDCARD = re.compile(r"\*\*?")


def replaced(new: str, match: re.Match[str]) -> str:
    """Return the new name, with the wildcards and the rest of the name as in the old one."""
    *wildcards, rest = (group.removesuffix(".") for group in match.groups())
    values = iter(wildcards)
    start = "" if new == ROOT else _WILDCARD.sub(lambda _: next(values), new)
    return ".".join(part for part in (*start.split("."), rest) if part)
