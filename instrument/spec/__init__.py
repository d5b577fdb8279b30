"""The configuration: its sections, specs and vocabulary. This package does not import torch."""
