"""Run `torchtitan.train` on CPUs, which torchtitan does not support: `torchrun -m titan_on_cpu --module MODULE --config CONFIG`."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device: "cpu"
torch.cpu.get_device_properties = lambda device: SimpleNamespace(total_memory=2**30)
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.train import main  # noqa: E402

set_divide_factor = FSDPModule.set_gradient_divide_factor


def set_divide_factor_for_gloo(module: FSDPModule, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply in a reduction
    set_divide_factor(module, factor)


FSDPModule.set_gradient_divide_factor = set_divide_factor_for_gloo
llama3.get_attention_config = lambda backend: (
    ScaledDotProductAttention.Config()
)  # FlexAttention has no backward pass on CPUs
main()
