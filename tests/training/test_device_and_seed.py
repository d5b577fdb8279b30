"""Device selection, seeds, and restoring the state of the process."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from instrument import ConfigError
from instrument.training.environment import choose_device, process_state


def draw_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_equal_seeds_give_equal_numbers_in_all_generators() -> None:
    draws = []
    for seed in (1, 1, 2):
        with process_state(seed=seed, deterministic=False):
            draws.append(draw_numbers())
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_process_state_is_restored(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    expected = draw_numbers()
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    threads = torch.get_num_threads()
    try:
        with process_state(seed=5, deterministic=True):
            assert torch.are_deterministic_algorithms_enabled()
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            torch.set_default_dtype(torch.float64)
            torch.set_num_threads(threads + 1)
            draw_numbers()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert draw_numbers() == expected
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


def test_configured_cublas_workspace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with process_state(seed=0, deterministic=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_all_allowed_seeds_can_be_set(seed: int) -> None:
    with process_state(seed=seed, deterministic=False):
        assert torch.initial_seed() == seed


def test_auto_selects_the_gpu_if_available() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["cuda", "mps", "xpu"])
def test_gpus_are_accepted_if_available(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    for module in modules.values():
        monkeypatch.setattr(module, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: no GPU is available") as refused:
        choose_device(name)
    assert refused.value.problems[0].allowed == "auto, cpu"
    monkeypatch.setattr(modules[name], "is_available", lambda: True)
    assert choose_device(name).type == name
    other = {"cuda": "mps", "mps": "xpu", "xpu": "mps"}[name]
    with pytest.raises(ConfigError) as refused:
        choose_device(other)
    assert refused.value.problems[0].allowed == f"auto, cpu, {name}"
