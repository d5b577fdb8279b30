"""Layers that have other names in another run: mappings with patterns, and suggestions for such a mapping."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence

from ..errors import ConfigError, Problem, similar_names
from ..fields.globs import ROOT
from ..formatting import shorten

MAX_COMPARED = 200  # layers of each run that are compared for a suggestion
_MAX_TRIED, _MAX_ENTRIES = 20, 30  # candidates for a suggested entry, and suggested entries


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
    names, used = _names(rename, layers)
    _check(rename, used, layers, others)
    if twice := _taken_twice(names, others):
        same = ", ".join(_shown(layer) for layer, name in names.items() if name == twice[0])
        raise ConfigError(Problem("rename", f"several layers of A get the name {_shown(twice[0])}", same))
    return names


def suggested_renaming(
    layers: Mapping[str, str], others: Mapping[str, str], rename: Mapping[str, str]
) -> dict[str, str]:
    """Return entries to add to `rename`, each of which matches more layers, the one that matches the most first.

    Args:
        layers: The class of each layer of a run, by name.
        others: The class of each layer of the other run, by name.
        rename: The given entries.
    """
    found: dict[str, str] = {}
    matched = _matched(layers, others, rename)
    left = [name for name in layers if name not in matched][:MAX_COMPARED]
    free = [name for name in others if name not in matched.values()][:MAX_COMPARED]
    entries = {(one, two): _difference(one, two) for one in left for two in free if layers[one] == others[two]}
    while len(found) < _MAX_ENTRIES:
        taken = {*matched.values()}
        count = Counter(entry for (one, two), entry in entries.items() if one not in matched and two not in taken)
        for (old, new), _ in count.most_common(_MAX_TRIED):
            now = _matched(layers, others, {**rename, **found, old: new}) if old not in found else {}
            if len(now) > len(matched):
                found[old], matched = new, now
                break
        else:
            break
    return found


def entries_text(rename: Mapping[str, str]) -> str:
    """Return entries as the arguments of `--rename`."""
    return shlex.join(f"{old}={new}" for old, new in rename.items())


def _matched(layers: Mapping[str, str], others: Mapping[str, str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the layers that the other run has with the same class; empty if two layers get the same name."""
    names, _ = _names(rename, [*layers])
    same = {layer: name for layer, name in names.items() if name in others and others[name] == layers[layer]}
    return {} if _taken_twice(names, [*others]) else same


def _names(rename: Mapping[str, str], layers: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the new name of each layer, and the new names that each entry makes."""
    names = dict(zip(layers, layers, strict=True))
    used: dict[str, list[str]] = {old: [] for old in rename}
    rules = [(old, pattern_of(old, new), new) for old, new in rename.items()]
    for layer in layers:
        matching = [(old, match, new) for old, pattern, new in rules if (match := pattern.fullmatch(_dotted(layer)))]
        if matching:
            old, match, new = max(matching, key=lambda rule: _segments(rule[0]))
            names[layer] = replaced(new, match)
            used[old].append(names[layer])
    return names, used


def _taken_twice(names: Mapping[str, str], others: Sequence[str]) -> list[str]:
    taken, known = Counter(names.values()), {*others}
    return [name for name in names.values() if taken[name] > 1 and name in known]


def _difference(layer: str, other: str) -> tuple[str, str]:
    """Return two names without the segments that they have in common at the end, and with `*` for their numbers if these are equal."""
    one, two = layer.split("."), other.split(".")
    while one and two and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
    if [name for name in one if name.isdigit()] == [name for name in two if name.isdigit()]:
        one, two = (["*" if name.isdigit() else name for name in each] for each in (one, two))
    return ".".join(one) or ROOT, ".".join(two) or ROOT


def _check(
    rename: Mapping[str, str], used: Mapping[str, Sequence[str]], layers: Sequence[str], others: Sequence[str]
) -> None:
    problems = []
    for old, new in rename.items():
        where = f"rename {old}={new}"
        if not used[old]:
            near = similar_names(old, [_shown(layer) for layer in layers])
            message = "matches no recorded layer of A, or only layers that a longer entry renames"
            problems.append(Problem(where, message, old, shorten([*map(_shown, layers)]), near))
        elif not set(used[old]) & set(others):
            near = similar_names(used[old][0], [_shown(layer) for layer in others])
            message = "no recorded layer of B has the new name"
            problems.append(Problem(where, message, used[old][0], shorten([*map(_shown, others)]), near))
    if problems:
        raise ConfigError(*problems)


def _shown(layer: str) -> str:
    return layer or ROOT


def _segments(pattern: str) -> int:
    return 0 if pattern == ROOT else pattern.count(".") + 1


def _dotted(layer: str) -> str:
    """Add a dot after every segment, so that each segment of a pattern can match its own dot."""
    return f"{layer}." if layer else ""


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
