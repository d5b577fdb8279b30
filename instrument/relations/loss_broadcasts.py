"""Relation: a loss of numbers compares each prediction with its own target."""

from __future__ import annotations

from collections.abc import Iterator

from .relation import RELATIONS, Checked, Relation


@RELATIONS.register("loss_broadcasts")
class LossBroadcasts(Relation):
    """Reads whether predictions [samples, 1] and targets [samples] were broadcast to [samples, samples]."""

    sources = ("losses",)

    def check(self) -> Iterator[Checked]:
        calls = self.training.pair_losses
        for call in calls:
            if call.broadcasts:
                yield Checked(
                    False, call.shape[0], f"{call.name} compares each prediction with all {call.shape[0]} targets"
                )
        if calls:
            yield Checked(True, len(calls), f"{calls[0].name} compares predictions with their targets")
