"""Fields of the configuration: their types, globs, targets (`_target_`) and registries of names. This package does not import torch."""
