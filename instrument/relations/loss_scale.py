"""Relation: the factor of a gradient scaler is at least 1."""

from __future__ import annotations

from collections.abc import Iterator

from .relation import RELATIONS, Checked, Relation

MINIMUM = 1.0
"""Below 1, the factor no longer protects small gradients, which is its purpose (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2). The smallest factor of DeepSpeed (`min_loss_scale`) is 1 too.
"""


@RELATIONS.register("loss_scale")
class LossScale(Relation):
    """Reads the factor of the gradient scaler. A factor that is below 1 from the start was chosen."""

    def attach(self) -> None:
        self._is_chosen = self.training.scaler is not None and self.training.scaler.get_scale() < MINIMUM

    def check(self) -> Iterator[Checked]:
        if self.training.scaler is not None and not self._is_chosen:
            scale = self.training.scaler.get_scale()
            holds = scale >= MINIMUM
            yield Checked(holds, scale, f"the gradient scaler multiplies the loss by {scale:g}")
