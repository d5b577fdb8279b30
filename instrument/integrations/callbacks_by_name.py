"""Trainer callbacks without code: environment variables select the hooks and the run folder."""

from __future__ import annotations

import os
from typing import Any

from . import HOOKS


def lightning_callbacks() -> list[Any]:
    """Return the callbacks of a Lightning `Trainer` (entry point `lightning.pytorch.callbacks_factory`).

    Lightning calls this function for each `Trainer`. Without `INSTRUMENT_HOOKS`, it imports nothing and returns an empty list.
    """
    if not os.environ.get(HOOKS):
        return []
    from .lightning import LightningCallback

    return [LightningCallback()]
