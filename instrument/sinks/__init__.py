"""Sinks: where rows and recorded tensors are written."""
