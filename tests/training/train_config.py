"""Train with a composed configuration: `python train_config.py CONFIG FOLDER`, with the configuration as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from instrument.config.parse import parse_config
from instrument.training.runner import run
from instrument.training.terminal import Terminal

raw = json.loads(sys.argv[1])
config = parse_config(raw)
run(config, Path(sys.argv[2]), Terminal(quiet=config.quiet), raw=raw, overrides={})
