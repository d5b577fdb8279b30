"""Reading and analysis of recorded data. This package does not import torch, except in `recorded_tensors` and `replay`."""
