"""A hook function that sends messages to its own run."""

from __future__ import annotations

import os
from pathlib import Path

from instrument.actions.base import Context
from instrument.storage.control_folder import send


def send_messages(tensor: object, context: Context) -> None:
    """Send changes at step 1, and a request to stop at step 4, from rank 1."""
    changes = {1: ["hooks.seen.every=1", "lr_scale=0.5"], 4: ["stop"]}
    if os.environ["RANK"] == "1" and context.step in changes:
        send(Path("out"), changes[context.step])
