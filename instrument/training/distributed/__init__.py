"""Distributed training: one run in several processes."""
