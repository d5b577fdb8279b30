"""Trainer callbacks that need no code: their hooks and their folder are in environment variables."""

from __future__ import annotations

import os
from typing import Any

HOOKS, OUT = "INSTRUMENT_HOOKS", "INSTRUMENT_OUT"


def lightning_callbacks() -> list[Any]:
    """Return the callback for each Trainer of Lightning (entry point `lightning.pytorch.callbacks_factory`); none without hooks.

    Lightning calls it for each Trainer, so it imports nothing without hooks.
    """
    if not os.environ.get(HOOKS):
        return []
    from .lightning import LightningCallback

    return [LightningCallback()]
