"""Modules that the server of `forked` imports before it forks."""

from __future__ import annotations

import weakref

import torch._dynamo  # `DistributedDataParallel` imports it
import torch.distributed.fsdp  # noqa: F401
from hydra.core.plugins import Plugins
from hydra.types import RunMode

import instrument.training.runner
import instrument.training.terminal  # noqa: F401
from instrument.configuration.search_path import config_loader
from instrument.spec.parse import parse_config

Plugins.instance()  # imports the installed plugins
config_loader().load_configuration("config", ["model=mlp", "data=digits"], RunMode.RUN)  # parses the files of conf/
target = {"_target_": "builtins.list"}
sections = {"model": target, "data": {"dataset": target}, "task": target, "optimizer": target, "train": {"steps": 1}}
parse_config(
    {**sections, "hooks": {"a": {"layers": "*", "kind": "forward", "action": "record"}}}
)  # creates the validators
for finalizer in list(weakref.finalize._registry):
    finalizer.atexit = False  # PyTorch unregisters its operators one by one at the end of each process
