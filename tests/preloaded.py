"""Modules that the server of `forked` imports before it forks."""

from __future__ import annotations

import gc
import weakref

import torch._dynamo  # `DistributedDataParallel` imports it
import torch.distributed.fsdp  # noqa: F401
from fast_composition import composition
from hydra.core.plugins import Plugins
from hydra.types import RunMode

import instrument.integrations.attach
import instrument.training.runner
import instrument.training.terminal  # noqa: F401
from instrument.commands.job import read_config
from instrument.config.hydra_internals import config_loader

fast = composition(fast=True)  # A context manager that is not kept ends its block when it is collected.
fast.__enter__()
Plugins.instance()  # imports the installed plugins
overrides = ["model=mlp", "data=digits", "hooks=activations"]
read_config(
    config_loader().load_configuration("config", overrides, RunMode.RUN)
)  # parses conf/, creates the validators
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False  # PyTorch unregisters its operators one by one at the end of each process
gc.freeze()  # A collection in a forked process does not visit, and thereby copy, what was imported before.
