"""Functions that run before calls of other libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import utils

from instrument.integrations.trainer_callback import CLIPPING


def weight_of(gradient: float) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([gradient])
    return weight


@pytest.mark.parametrize("form", ["tensor", "list", "generator"])
def test_function_sees_the_gradients_before_the_clip(form: str) -> None:
    weight, seen = weight_of(3.0), []
    parameters = {"tensor": weight, "list": [weight], "generator": (each for each in [weight])}[form]
    with CLIPPING.before(lambda found: seen.extend(each.grad.item() for each in found if each.grad is not None)):
        norm = utils.clip_grad_norm_(parameters, max_norm=0.5, norm_type=2.0)
    assert (seen, norm.item()) == ([3.0], 3.0)
    assert weight.grad.item() == pytest.approx(0.5, rel=1e-5)


def test_function_of_pytorch_is_restored_in_any_order() -> None:
    original, seen = utils.clip_grad_norm_, []
    one, other = (CLIPPING.before(lambda _, name=name: seen.append(name)) for name in ("one", "other"))
    one.__enter__()
    other.__enter__()
    utils.clip_grad_norm_([weight_of(3.0)], 1.0)
    one.__exit__(None, None, None)
    utils.clip_grad_norm_([weight_of(3.0)], 1.0)
    other.__exit__(None, None, None)
    assert utils.clip_grad_norm_ is original
    assert seen == ["one", "other", "other"]


def test_patches_of_other_code_are_called_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = utils.clip_grad_norm_, []

    def patched(*given: Any, **options: Any) -> torch.Tensor:
        seen.append("patch")
        return original(*given, **options)

    monkeypatch.setattr(utils, "clip_grad_norm_", patched)
    with CLIPPING.before(lambda _: seen.append("one")):
        utils.clip_grad_norm_([weight_of(3.0)], 1.0)
        within = utils.clip_grad_norm_
        monkeypatch.setattr(utils, "clip_grad_norm_", lambda parameters, norm: within(parameters, norm, 2.0))
    with CLIPPING.before(lambda _: seen.append("other")):
        utils.clip_grad_norm_([weight_of(3.0)], 1.0)
    utils.clip_grad_norm_([weight_of(3.0)], 1.0)
    assert seen == ["one", "patch", "other", "patch", "patch"]
