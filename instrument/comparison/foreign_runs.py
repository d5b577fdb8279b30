"""Folders of tensors opened as runs for a comparison: with computed tensors, aligned tokens, and their rounding noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..analysis.load import Run
from ..errors import ConfigError, Problem
from .foreign_folder import FLOAT64, Entry, ForeignFolder, is_foreign, read_folder
from .layer_renaming import renamed_layers
from .tensor_errors import tensor_errors
from .tensor_expressions import with_derived
from .token_alignment import aligned_folders


@dataclass(frozen=True)
class Noise:
    """The rounding noise of tensors: their largest relative L2 errors against the same tensors in float64.

    Attributes:
        errors: For each side that was measured, `a` or `b`: the errors by layer, role and path.
        source: A description of how the noise is known.
        entries: The tensors of A in the order of execution.
    """

    errors: Mapping[str, Mapping[tuple[str, str, str], float]]
    source: str
    entries: Sequence[Entry]

    def of(self, locations: pd.DataFrame) -> np.ndarray:
        """Return the noise of each location, the larger one of both sides; float64, shape [locations], NaN where it is unknown."""
        noise = np.full(len(locations), np.nan)
        for side, errors in self.errors.items():
            columns = ["layer", "role", "path"] if side == "a" else ["layer_b", "role", "path_b"]
            keys = locations[columns].itertuples(index=False, name=None)
            noise = np.fmax(noise, [errors.get(key, np.nan) for key in keys])
        return noise

    def order_of(self, locations: pd.DataFrame) -> dict[tuple[int, int, int], int]:
        """Return the index in the order of execution by location, step and call."""
        rows = locations[["layer", "role", "path"]].itertuples(name=None)
        index = {(layer, role, path): location for location, layer, role, path in rows}
        return {
            (index[entry.name[:3]], entry.step, entry.call): order
            for order, entry in enumerate(self.entries)
            if entry.name[:3] in index
        }


def opened_folders(
    paths: Sequence[Run | str | Path],
    opened: Sequence[Run | None],
    rename: Mapping[str, str],
    expressions: Mapping[str, str],
) -> tuple[tuple[Run, Run], Noise, str]:
    """Open two folders, of which at least one contains tensors of another program.

    Args:
        paths: The two folders.
        opened: Those that are runs; None for folders of tensors.
        rename: The layers with another name in B.
        expressions: The expressions of tensors of B; see `with_derived`.

    Returns:
        The runs, the rounding noise, and a description of the alignment.

    Raises:
        ConfigError: A folder cannot be read, an expression is invalid, or the folders have no token in common.
    """
    a, b = (
        read_folder(str(path)) if run is None else ForeignFolder(run.path, _entries_of(run), {}, {}, None)
        for path, run in zip(paths, opened, strict=True)
    )
    if expressions and opened[1] is not None:
        old, new = next(iter(expressions.items()))
        fix = "exchange A and B, or write B with instrument.dump"
        raise ConfigError(Problem(f"rename {old}={new}", "an expression requires a folder of tensors as B", fix=fix))
    names = renamed_layers(rename, *(list(dict.fromkeys(entry.layer for entry in each.entries)) for each in (a, b)))

    def aligned(one: ForeignFolder, other: ForeignFolder) -> tuple[list[Entry], list[Entry], str]:
        other = replace(other, entries=with_derived(other.entries, a.entries, expressions, names))
        return aligned_folders(one, other) if list(opened) == [None, None] else (one.entries, other.entries, "")

    *entries, alignment = aligned(a, b)
    errors = {}
    for side, (folder, run) in enumerate(zip((a, b), opened, strict=True)):
        if run is None and is_foreign(folder.path / FLOAT64):
            exact = read_folder(folder.path / FLOAT64)
            of_a, of_b, _ = aligned(a, exact) if side else aligned(exact, b)
            errors["ab"[side]] = _errors(entries[side], of_b if side else of_a)
    measured = " and ".join(str((a, b)["ab".index(side)].path / FLOAT64) for side in errors)
    source = f"measured against {measured}" if errors else "estimated from dtype, depth and length of sums"
    runs = [
        replace(folder, entries=own).run(_phase(opened[1 - side]) or "forward") if run is None else run
        for side, (folder, own, run) in enumerate(zip((a, b), entries, opened, strict=True))
    ]
    skipped = [
        f"not written by {name}: {key} ({text})"
        for name, each in zip("AB", (a, b), strict=True)
        for key, text in each.skipped.items()
    ]
    return (
        (runs[0], runs[1]),
        Noise(errors, source, entries[0]),
        "\n".join([alignment, *skipped] if alignment else skipped),
    )


def _errors(entries: Sequence[Entry], exact: Sequence[Entry]) -> dict[tuple[str, str, str], float]:
    """Return the largest relative L2 error of each tensor, by layer, role and path."""
    known = {(*entry.name, entry.step): entry for entry in exact}
    errors: dict[tuple[str, str, str], float] = {}
    for entry in entries:
        reference = known.get((*entry.name, entry.step))
        if reference is not None:
            one, other = entry.load(), reference.load()
            if one.shape == other.shape and one.is_floating_point():
                l2 = tensor_errors(_numpy(one), _numpy(other), ("float64", "float64")).l2
                errors[entry.name[:3]] = max(errors.get(entry.name[:3], 0.0), l2)
    return errors


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.to(torch.float64).numpy()
    return array


def _phase(run: Run | None) -> str | None:
    """Return the phase of the recorded tensors of a run; None without any."""
    batch = next(run.scan("tensors", ["phase"]), None) if run is not None else None
    return None if batch is None or not batch.num_rows else str(batch["phase"][0])


def _entries_of(run: Run) -> list[Entry]:
    """Return the recorded tensors of a run, without their values, which the comparison reads."""
    columns = ["layer", "role", "path", "step", "call", "module_type"]

    def load() -> Tensor:
        raise NotImplementedError

    rows = [row for batch in run.scan("tensors", columns) for row in batch.to_pylist()]
    return [Entry(load=load, **row) for row in rows]
