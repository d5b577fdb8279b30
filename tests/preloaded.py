"""Modules that the server of `forked` imports before it forks."""

from __future__ import annotations

import torch._dynamo  # `DistributedDataParallel` imports it
import torch.distributed.fsdp  # noqa: F401
from hydra.core.plugins import Plugins

import instrument.training.runner
import instrument.training.terminal  # noqa: F401

Plugins.instance()  # imports the installed plugins
