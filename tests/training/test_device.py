"""The device, the seeds, and a process that is left as it was found."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from instrument import ConfigError
from instrument.training.device import choose_device, process_state


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_the_same_seed_draws_the_same_numbers_from_all_three_generators() -> None:
    found = []
    for seed in (1, 1, 2):
        with process_state(seed=seed, deterministic=False):
            found.append(draws())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_is_left_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    expected = draws()
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
            draws()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert draws() == expected
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


def test_a_workspace_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with process_state(seed=0, deterministic=True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_every_seed_that_a_configuration_allows_can_be_set(seed: int) -> None:
    with process_state(seed=seed, deterministic=False):
        assert torch.initial_seed() == seed


def test_auto_is_the_gpu_where_there_is_one() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device: there is no GPU"):
        choose_device("cuda")
