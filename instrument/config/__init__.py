"""The configuration: its sections, specs and messages, and Hydra's search path and loader. This package does not import torch."""
