"""The store of the process group: torchrun restarts processes with the same store, which has the keys of those before them."""

from __future__ import annotations

import os
from typing import Any


def store_of_restart(store: Any = None) -> Any:
    """Return a `Store` without the keys of the processes before a restart. Default: that of the process group.

    On several machines, the number of restarts may differ, and the store is returned unchanged.
    """
    from torch.distributed import distributed_c10d  # only runs with several processes import PyTorch here

    store = distributed_c10d._get_default_store() if store is None else store
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return store
    return distributed_c10d.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
