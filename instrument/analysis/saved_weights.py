"""The final weights that a run saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InstrumentError, Problem, similar_names

if TYPE_CHECKING:
    from torch import Tensor

    from .run_tables import RunTables

WEIGHTS = "weights.pt"  # File in the run folder: the final state dict of the model.


def saved_weights(run: RunTables) -> dict[str, Tensor]:
    """Return the final weights of a run by name, in CPU memory.

    A run that trained nothing, with `init_from`, has those of the run that it loaded.
    """
    import torch

    source = (run.info.get("init_from") or {}).get("path")
    for folder in (run.path, *([] if source is None else [Path(source)])):
        if (folder / WEIGHTS).is_file():
            with (folder / WEIGHTS).open("rb") as file:
                weights: dict[str, Tensor] = torch.load(file, weights_only=True, map_location="cpu")
            return weights
    message = f"the run saved no weights: it has no {WEIGHTS}"
    fix = "train with train.save=true, or pass the module or its weight"
    raise InstrumentError(Problem("run", message, str(run.path), fix=fix))


def weight_named(weights: dict[str, Tensor], name: str, where: str) -> Tensor:
    """Return one of the saved weights."""
    if name not in weights:
        message, similar = "the saved weights have no such name", similar_names(name, weights)
        fix = "pass the module or its weight"
        raise InstrumentError(Problem(where, message, name, ", ".join(weights), similar, fix))
    return weights[name]
