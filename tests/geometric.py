"""PyTorch Geometric, without its replacement of `torch.index_select`, which would change the operators of other tests."""

import torch

_index_select = torch.index_select

from torch_geometric.data import Batch, Data  # noqa: E402, F401

torch.index_select = _index_select
