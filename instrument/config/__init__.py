"""Hydra's search path, and a loader that overrides known fields without a plus."""
