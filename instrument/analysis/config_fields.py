"""Values of a configuration as text, its fields, and the fields in which mappings differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

EXACT_BELOW = 2**53  # integers below this are exact as float


def differing_fields(key: str, value: Any, values: Iterable[Any]) -> dict[str, Any]:
    """Return the fields of a mapping that another one of `values` lacks, or has with another value: `{"hooks.tame.norm": 0.1}`.

    For a value that is not a mapping, or has no such field, return the value of `key` itself.
    """
    if not isinstance(value, Mapping):
        return {key: value}
    others = [leaves_of({key: other}) for other in values if isinstance(other, Mapping)]
    texts = leaves_of({key: value})
    fields = {name: item for name, item in leaves(value, key) if any(each.get(name) != texts[name] for each in others)}
    return fields or {key: value}


def split_overrides(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replace each mapping that differs between runs by the fields in which it differs."""
    values: dict[str, list[Any]] = {}
    for overrides in runs:
        for key, value in overrides.items():
            values.setdefault(key, []).append(value)
    fields = [[differing_fields(key, value, values[key]) for key, value in overrides.items()] for overrides in runs]
    return [{name: item for each in of_run for name, item in each.items()} for of_run in fields]


def canonical_json(value: Any) -> str:
    """Return a value of a configuration as a string for comparison.

    The strings of equal values are equal: 1 equals 1.0, but 1 does not equal true.
    """
    return json.dumps(_integers_if_whole(value), sort_keys=True, default=str)


def to_yaml(value: Any) -> str:
    """Return a value as it is written on a command line or in a file: `null`, `{kind: forward, norm: 0.1}`."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def leaves_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a configuration as strings by key, such as `optimizer.lr`."""
    return {key: canonical_json(value) for key, value in leaves(config)}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, also empty ones, by the names that lead to each, joined by dots to `key`."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _integers_if_whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _integers_if_whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_integers_if_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_BELOW else value
