"""nvidia-dlfw-inspect: the feature LogTensorStats, called from hooks of the benchmark.

The tool does not attach hooks to PyTorch's modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nvdlfw_inspect.api as debug_api
from job import Job, Step, Training, leaf_hooks

CONFIG = """
all:
  enabled: true
  layers: {layer_name_regex_pattern: ".*"}
  base:
    LogTensorStats:
      enabled: true
      tensors: [output, gradient]
      stats: [min, max, mean, std, l1_norm, l2_norm]
      freq: 1
"""


@contextmanager
def statistics(training: Training, folder: Path) -> Iterator[Step]:
    config = folder / "inspect.yaml"
    config.write_text(CONFIG)
    debug_api.initialize(config_file=str(config), log_dir=str(folder), default_logging_enabled=True)

    def log_statistics(name: str, role: str, tensor: object) -> None:
        debug_api.log_tensor_stats(name, tensor_name=role, tensor=tensor, skip_reduction=True)

    def step() -> None:
        training.step().item()
        debug_api.step()

    try:
        with leaf_hooks(training, log_statistics):
            yield step
    finally:
        debug_api.end_debug()


JOBS = (Job("6 statistics of outputs and gradients, to a text log", statistics),)
