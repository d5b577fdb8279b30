"""The examples of the pages of kinds, actions and rules: each one runs, and what it declares acts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import REPOSITORY
from tiers import tiered
from torch import nn
from training_runs import prepared

import instrument
from instrument.tables.kinds import KINDS

BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.M | re.S)
EXAMPLES: dict[str, dict[str, Any]] = {
    f"{page} {section.splitlines()[0]}": yaml.safe_load(text)
    for page in ("kinds", "actions", "rules")
    for section in re.split(r"^##+ ", (REPOSITORY / "docs" / "reference" / f"{page}.md").read_text(), flags=re.M)
    for text in BLOCK.findall(section)
}
SPECS = {name: example["hooks"]["mine"] for name, example in EXAMPLES.items() if "hooks" in example}
CHANGES = [name for name, spec in SPECS.items() if spec["action"] in ("clip", "scale", "modify")]
MODULE = """
import torch
from torch import nn

import instrument
from instrument.training.models import MnistCNN

class Net(MnistCNN):
    def __init__(self):
        super().__init__(encoder=[4, 4], decoder=[8], image_size=8)
        for module in self.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True

    def forward(self, images):
        return torch.softmax(super().forward(images), dim=-1)

def look(tensor, context):
    assert tensor.numel()

def half_off(tensor, context, share):
    return tensor * share

def tie(module, name):
    nn.init.zeros_(module.weight)

class Residual(nn.Sequential):
    pass

class MyRule(instrument.Rule):
    def update(self, rows):
        yield instrument.Firing("every step", value=1.0, threshold=0.0)
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module and the run that the examples name, and a process group of one process."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "mymodule.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        train({"kept": {"layers": "encoder.1", "kind": "forward", "action": "record", "tensors": True}}, out="runs/a")
        yield folder
        torch.distributed.destroy_process_group()


def train(hooks: dict[str, Any], **options: Any) -> instrument.Probe:
    """Run 6 steps of a loop in which every kind of hook can fire."""
    torch.manual_seed(0)
    model = import_module("mymodule").Net()
    optimizer = torch.optim.Adam(model.parameters())
    with instrument.attach(model, hooks, optimizer=optimizer, **options) as probe:
        for _ in range(6):
            output = model(torch.randn(4, 1, 8, 8))
            loss = probe.loss(100 * nn.functional.cross_entropy(output, torch.tensor([0, 1, 2, 3])))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            model.load_state_dict(model.state_dict())
            probe.end_step(loss=loss)
    return probe


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")  # such as modules whose input needs no gradient
def test_hooks_of_the_kinds_and_of_actions_that_change_nothing_fire() -> None:
    hooks = {re.sub(r"\W+", "_", name): spec for name, spec in SPECS.items() if name not in CHANGES}
    assert len(hooks) == len(KINDS) + len({"record", "print", "call"})
    fired = {row["hook"] for row in train(hooks).coverage() if row["fired"]}
    assert fired == {*hooks}


@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")  # such as a loss that is NaN
@pytest.mark.parametrize("name", tiered(CHANGES, [CHANGES[0], CHANGES[-1]]))
def test_intervention_of_an_example_changes_tensors(name: str) -> None:
    assert train({"mine": SPECS[name]}).effects.changed_fraction.max() > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if "apply" in example])
def test_apply_of_an_example_changes_the_model(name: str) -> None:
    def described(sections: dict[str, Any]) -> list[object]:
        model = prepared(model={"_target_": "mymodule.Net"}, **sections).model
        parameters = [(name, value.requires_grad, value.sum().item()) for name, value in model.named_parameters()]
        return [str(model), parameters]

    assert described(EXAMPLES[name]) != described({})


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "changed", "warning"),
    [("watch", {"below": 1e3, "for": 2, "then": "warn"}, "std"), ("_target_", {"then": "warn"}, "every step")],
)
def test_rule_of_an_example_fires(name: str, changed: dict[str, Any], warning: str) -> None:
    rule = {**EXAMPLES[f"rules `{name}`"]["rules"]["mine"], **changed}
    with pytest.warns(instrument.InstrumentWarning, match=warning):
        probe = train({"activations": {"layers": "**", "kind": "forward", "action": "record"}}, rules={"mine": rule})
    assert (probe.events["rule"] == "mine").any()
