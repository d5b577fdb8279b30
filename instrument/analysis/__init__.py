"""Reading and analysis of recorded data. This package does not import torch, except in `archive` and `replay`."""
