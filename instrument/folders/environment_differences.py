"""Comparison of the environments of two runs: versions, hardware, data and custom code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Entries of run.json, or of one of its mappings, without which a run cannot be repeated exactly.
REQUIRED = ("versions", "hardware", "data")
DECISIVE_VERSIONS = ("torch", "torchvision", "numpy")


@dataclass(frozen=True)
class EnvironmentDifference:
    """A difference between the environments of two runs.

    Attributes:
        what: The entry of run.json, such as `versions.torch`.
        recorded: Its value in the first run.
        present: Its value in the second run.
        is_decisive: Whether the second run cannot be expected to give the same bits.
    """

    what: str
    recorded: object
    present: object
    is_decisive: bool

    def __str__(self) -> str:
        return f"{self.what} is {_text(self.present)}, but was {_text(self.recorded)}"


def environment_differences(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[EnvironmentDifference]:
    """Return the differences between the environments of two runs, the decisive ones first.

    An entry that the first run does not have is not compared.

    Args:
        recorded: The content of run.json of the first run.
        present: That of the second run.
    """
    pairs = [("device", recorded.get("device"), present.get("device"), True)]
    for section in ("hardware", "versions", "code"):
        ours, theirs = present.get(section) or {}, recorded.get(section) or {}
        pairs += [
            (f"{section}.{name}", value, ours.get(name), section == "hardware" or name in DECISIVE_VERSIONS)
            for name, value in theirs.items()
            if section != "code" or name in ours  # Hooks with other custom code may have been left out.
        ]
    data, own_data = recorded.get("data") or {}, present.get("data") or {}
    pairs += [(f"data.{name}", data.get(name), own_data.get(name), True) for name in ("dataset", "train_samples")]
    hashes, own_hashes = data.get("hashes") or {}, own_data.get("hashes") or {}
    pairs += [(f"content of the {name} samples", hashes.get(name), own_hashes.get(name), True) for name in hashes]
    weights, own_weights = recorded.get("init_from") or {}, present.get("init_from") or {}
    if weights and own_weights:
        pairs.append(("content of init_from", weights["sha256"], own_weights["sha256"], True))
    pairs.append(("git_revision", recorded.get("git_revision"), present.get("git_revision"), False))
    found = [EnvironmentDifference(*pair) for pair in pairs if pair[1] != pair[2]]
    return sorted(found, key=lambda difference: not difference.is_decisive)


def _text(value: object) -> str:
    return "missing" if value is None else str(value)
