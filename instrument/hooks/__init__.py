"""Implementations of the hook kinds on PyTorch's hooks: one file per family of kinds."""
