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
        order: The index of each tensor of A in the order of execution, by layer, role, path, call and step.
    """

    errors: Mapping[str, Mapping[tuple[str, str, str], float]]
    source: str
    order: Mapping[tuple[str, str, str, int, int], int]

    def of(self, locations: pd.DataFrame) -> np.ndarray:
        """Return the noise of each location, the larger one of both sides; float64, shape [locations], NaN where it is unknown."""
        noise = np.full(len(locations), np.nan)
        for side, errors in self.errors.items():
            columns = ["layer", "role", "path"] if side == "a" else ["layer_b", "role", "path_b"]
            keys = locations[columns].itertuples(index=False, name=None)
            noise = np.fmax(noise, [errors.get(key, np.nan) for key in keys])
        return noise


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

    of_a, of_b, alignment = aligned(a, b)
    errors, measured = {}, []
    if opened[0] is None and is_foreign(exact := a.path / FLOAT64):
        errors["a"] = _errors(of_a, aligned(read_folder(exact), b)[0])
        measured.append(str(exact))
    if opened[1] is None and is_foreign(exact := b.path / FLOAT64):
        errors["b"] = _errors(of_b, aligned(a, read_folder(exact))[1])
        measured.append(str(exact))
    source = (
        f"measured against {' and '.join(measured)}" if errors else "estimated from dtype, depth and length of sums"
    )
    one = opened[0] or replace(a, entries=of_a).run(_phase(opened[1]))
    other = opened[1] or replace(b, entries=of_b).run(_phase(opened[0]))
    lines = [alignment] if alignment else []
    for side, folder in (("A", a), ("B", b)):
        lines += [f"not written by {side}: {name} ({text})" for name, text in folder.skipped.items()]
    order = {(*entry.name, entry.step): index for index, entry in enumerate(of_a)}
    return (one, other), Noise(errors, source, order), "\n".join(lines)


def _errors(entries: Sequence[Entry], exact: Sequence[Entry]) -> dict[tuple[str, str, str], float]:
    """Return the largest relative L2 error of each tensor, by layer, role and path."""
    pairs = {(*entry.name, entry.step): entry for entry in exact}
    errors: dict[tuple[str, str, str], float] = {}
    for entry in entries:
        if reference := pairs.get((*entry.name, entry.step)):
            one, other = entry.load(), reference.load()
            if one.shape == other.shape and one.is_floating_point() and other.dtype == torch.float64:
                l2 = tensor_errors(one.double().numpy(), other.numpy(), ("float64", "float64")).l2
                errors[entry.name[:3]] = max(errors.get(entry.name[:3], 0.0), l2)
    return errors


def _phase(run: Run | None) -> str:
    """Return the phase of the recorded tensors of a run."""
    batch = next(run.scan("tensors", ["phase"]), None) if run is not None else None
    return "forward" if batch is None or not batch.num_rows else str(batch["phase"][0])


def _entries_of(run: Run) -> list[Entry]:
    """Return the recorded tensors of a run, without their values, which the comparison reads."""
    columns = ["layer", "role", "path", "step", "call", "module_type"]
    return [Entry(load=Tensor, **row) for batch in run.scan("tensors", columns) for row in batch.to_pylist()]
