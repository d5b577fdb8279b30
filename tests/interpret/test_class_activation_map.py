"""Class activation maps: values against PyTorch code, classes, samples, pictures and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_in
from hook_runs import run_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from training_runs import train_here

import instrument
from instrument import InstrumentError
from instrument.interpret import class_activation_map
from instrument.plot import class_activation_map as plot
from instrument.training.models import MnistCNN

RECORD = {"action": "record", "stats": "none", "tensors": True}
HOOKS = {
    "image": {**RECORD, "layers": ".", "kind": "forward_pre"},
    "maps": {**RECORD, "layers": "encoder.*", "kind": "forward"},
    "gradients": {**RECORD, "layers": "encoder.*", "kind": "full_backward_pre"},
}
IDS = [30, 10, 20]  # the loop calls them in this order


def net(**options: bool) -> MnistCNN:
    torch.manual_seed(1)
    return MnistCNN(encoder=(3, 6), decoder=(), image_size=8, classes=4, **options).eval()


def record(
    model: nn.Module, images: Tensor, hooks: dict[str, object], score: Callable[[Tensor], Tensor]
) -> instrument.Run:
    with instrument.attach(model, hooks) as probe:
        for i, sample in enumerate(IDS):
            probe.batch(ids=[sample], targets=[i])
            score(model(images[i : i + 1])).sum().backward()
            probe.end_step()
    return probe.run


@pytest.fixture(scope="module")
def model() -> MnistCNN:
    return net(global_pooling=True)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def run(model: MnistCNN, images: Tensor) -> instrument.Run:
    """Three samples, with the gradients of the score of class 2."""
    return record(model, images, HOOKS, lambda scores: scores[:, 2])


def ascending(values: Tensor) -> np.ndarray:
    """Return the values of the samples in ascending order of their ids."""
    return values.detach().double().numpy()[np.argsort(IDS)]


def charts_of(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.images]


def test_cam_equals_weighted_feature_maps(run: instrument.Run, model: MnistCNN, images: Tensor) -> None:
    classifier = model.decoder[0]
    features = model.encoder(images)  # [N, C, H, W]
    expected = sum(classifier.weight[1, k] * features[:, k] for k in range(6))
    found = class_activation_map(run, classifier=classifier.weight, classes=1)
    assert (found.layer, found.ids.tolist(), found.y.tolist()) == ("encoder.1", [10, 20, 30], [1, 2, 0])
    np.testing.assert_allclose(found.maps[:, 0], ascending(expected), rtol=1e-5, atol=1e-6)
    scores = found.maps.mean((2, 3))[:, 0] + classifier.bias[1].item()
    np.testing.assert_allclose(scores, ascending(model(images))[:, 1], rtol=1e-5, atol=1e-6)
    several = class_activation_map(run, classifier=classifier.weight.detach().numpy(), classes=[3, 1])
    assert several.classes.tolist() == [[3, 1]] * 3
    np.testing.assert_array_equal(several.maps[:, 1], found.maps[:, 0])
    weight = classifier.weight.detach().double().numpy() / 3.0  # not exact in float32
    exact = class_activation_map(run, classifier=weight, classes=1).maps
    np.testing.assert_array_equal(class_activation_map(run, classifier=weight.tolist(), classes=1).maps, exact)
    np.testing.assert_array_equal(class_activation_map(run, classifier=weight[::-1], classes=2).maps, exact)


def test_classes_are_those_of_the_layer_with_its_bias(run: instrument.Run, model: MnistCNN, images: Tensor) -> None:
    layer = copy.deepcopy(model.decoder[0])
    nn.init.constant_(layer.bias, 0.0)
    layer.bias.data[3] = 100.0
    found = class_activation_map(run, classifier=layer)
    assert found.classes.tolist() == [[3]] * 3
    given = class_activation_map(run, classifier=layer.weight, classes=3)
    np.testing.assert_allclose(found.maps, given.maps, rtol=1e-6, atol=1e-9)
    layer.bias = None
    expected = (model.encoder(images).mean((2, 3)) @ layer.weight.T).argmax(1)
    assert sorted(class_activation_map(run, classifier=layer).classes[:, 0].tolist()) == sorted(expected.tolist())


def test_grad_cam_equals_pytorch_code(run: instrument.Run, model: MnistCNN, images: Tensor) -> None:
    for layer, block in (("encoder.0", 0), ("encoder.1", 1)):
        features = model.encoder[: block + 1](images).detach().requires_grad_()
        rest = model.encoder[block + 1 :](features)
        score = model.decoder(rest.mean((2, 3)))[:, 2].sum()
        (gradient,) = torch.autograd.grad(score, features)
        weight = gradient.mean((2, 3), keepdim=True)
        expected = torch.relu((weight * features).sum(1))
        found = class_activation_map(run, layer)
        assert found.classes is None
        np.testing.assert_allclose(found.maps[:, 0], ascending(expected), rtol=1e-5, atol=1e-7)


def test_grad_cam_is_the_positive_part_of_cam_after_global_pooling(run: instrument.Run, model: MnistCNN) -> None:
    cam = class_activation_map(run, classifier=model.decoder[0].weight, classes=2).maps
    grad_cam = class_activation_map(run).maps
    pixels = cam.shape[-1] * cam.shape[-2]
    np.testing.assert_allclose(grad_cam * pixels, np.maximum(cam, 0.0), rtol=1e-5, atol=1e-6)


def test_call_of_a_layer_is_selected(model: MnistCNN, images: Tensor) -> None:
    twice = nn.Sequential(model.encoder[0], nn.Conv2d(3, 1, 1), model.encoder[0])
    hooks = {name: {**HOOKS[name], "layers": "0"} for name in ("maps", "gradients")}
    run = record(twice, images, hooks, lambda maps: maps[:, 2].mean())
    for call, block in enumerate((twice[:1], twice)):
        classifier = torch.ones(1, 3)
        found = class_activation_map(run, "0", classifier=classifier, classes=0, call=call)
        np.testing.assert_allclose(found.maps[:, 0], ascending(block(images).sum(1)), rtol=1e-5, atol=1e-6)
    assert np.any(class_activation_map(run, "0", call=0).maps)
    assert len(charts_of(plot(run, "0", call=1))) == len(IDS)


def test_maps_are_drawn_over_the_image_of_each_sample(run: instrument.Run, model: MnistCNN, images: Tensor) -> None:
    figure = plot(run, classifier=model.decoder[0].weight, classes=[0, 3], samples=[30, 10])
    charts = charts_of(figure)
    titles = ["sample 30, target 0", "class 0", "class 3", "sample 10, target 1", "class 0", "class 3"]
    assert [axes.get_title() for axes in charts] == titles
    found = class_activation_map(run, classifier=model.decoder[0].weight, classes=[0, 3])
    for axes, row, image in ((charts[1], 2, images[0, 0]), (charts[4], 0, images[1, 0])):
        below, above = axes.images
        np.testing.assert_array_equal(below.get_array(), image)
        np.testing.assert_array_equal(above.get_array(), found.maps[row, 0])
        assert above.get_extent() == [-0.5, 7.5, 7.5, -0.5]
        largest = np.abs(found.maps[row]).max()
        assert above.get_clim() == (-largest, largest)
    assert figure.get_suptitle() == "CAM, encoder.1"
    of_score = plot(run, samples=20)
    assert [axes.get_title() for axes in charts_of(of_score)] == ["sample 20, target 2", "Grad-CAM"]
    assert charts_of(of_score)[1].images[1].get_cmap().name == "viridis"


def test_maps_without_images_and_ids(model: MnistCNN, images: Tensor) -> None:
    scores, probe = run_step(model, {"maps": HOOKS["maps"]}, images)
    figure = plot(probe.run, classifier=model.decoder[0].weight, samples=1)
    (axes,) = charts_of(figure)
    best = class_activation_map(probe.run, classifier=model.decoder[0].weight)
    assert best.y is None
    weight = model.decoder[0].weight
    expected = (model.encoder(images).mean((2, 3)) @ weight.T).argmax(1)  # an array has no bias
    assert best.classes[:, 0].tolist() == expected.tolist()
    assert axes.get_title() == f"sample 1: class {expected[1]}"
    assert len(axes.images) == 1
    assert scores.shape == (3, 4)


def test_missing_data_is_an_error_with_options(run: instrument.Run, model: MnistCNN, images: Tensor) -> None:
    weight = model.decoder[0].weight
    for arguments, message in (
        ({"layer": "encoder.2"}, r"(?s)no tensors of this layer were recorded.*similar  encoder"),
        ({"layer": "."}, "no tensors of this layer were recorded"),
        ({"classifier": weight, "classes": 4}, r"(?s)classes: no such class.*given    4\n.*0 to 3"),
        (
            {"classifier": model.decoder},
            r"(?s)classifier: must be a linear layer.*given    Sequential.*pass its weight",
        ),
        ({"classifier": weight[:, :5]}, r"(?s)classifier: wrong shape.*\[4, 5\].*encoder\.1 has 6 channels"),
        ({"classifier": "decoder.0"}, "the run saved no weights"),
        ({"classes": 1}, r"(?s)those of one score.*classifier="),
    ):
        with pytest.raises(InstrumentError, match=message):
            class_activation_map(run, **arguments)
    with pytest.raises(InstrumentError, match=r"(?s)the sample was not recorded.*40.*10, 20, 30"):
        plot(run, samples=40)
    alone = record(model, images, {"maps": HOOKS["maps"]}, lambda scores: scores)
    with pytest.raises(InstrumentError, match=r"the gradient of its output was not recorded(.|\n)*full_backward_pre"):
        class_activation_map(alone)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of `+exp=class_activation_map` and `+exp=grad_cam`, with small models and images."""
    folder = tmp_path_factory.mktemp("cam")
    small = ("data=digits", "model.encoder=[4,8]", "model.image_size=8", "data.slice.stop=64", "quiet=true")
    record_at = [f"hooks.{hook}.steps=[2]" for hook in ("digit", "maps")]
    answers = [
        run_in(folder, "+exp=class_activation_map", "hydra.run.dir=runs/cam", *small, "train.steps=2", *record_at),
        run_in(folder, "+exp=grad_cam", "hydra.run.dir=runs/grad_cam", *small, "data.slice.stop=4"),
    ]
    assert [answer.code for answer in answers] == [0, 0], [answer.err for answer in answers]
    return folder / "runs"


@pytest.mark.slow
def test_experiments_have_what_the_maps_require(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = instrument.load(folder / "cam")
    found = class_activation_map(run, classifier="decoder.0")
    assert found.maps.shape == (10, 1, 2, 2)
    assert sorted(found.y) == list(range(10))
    figure = plot(run, classifier="decoder.0", classes=[3, 5])
    assert len(charts_of(figure)) == 4 * 3
    assert figure.get_suptitle() == "CAM, encoder.1, 4 of 10 samples"
    run = instrument.load(folder / "grad_cam")
    assert class_activation_map(run, "encoder.0").maps.shape == (4, 1, 4, 4)
    assert plot(run, "encoder.1").get_suptitle() == "Grad-CAM of the score [:, 3], encoder.1"
    monkeypatch.chdir(folder.parent)  # init_from is relative to it
    loaded = class_activation_map(run, "encoder.1", classifier="decoder.0", classes=3)  # the weights of the first run
    assert loaded.y.tolist() == [3] * 4


def test_weights_of_another_step_and_gradients_of_a_loss_are_refused(tmp_path: Path) -> None:
    hooks = [
        "+hooks.maps={layers: encoder.1, kind: forward, action: record, tensors: true}",
        "+hooks.gradients={layers: encoder.1, kind: full_backward_pre, action: record, tensors: true}",
    ]
    small = ("data=digits", "model=mnist_cnn", "model.image_size=8", "model.global_pooling=true", "model.decoder=[]")
    run = train_here(tmp_path / "out", *small, "data.slice.stop=8", "train.steps=1", "train.save=true", *hooks)
    message = r"the saved weights are those after 1 steps(.|\n)*phase: probe at step 1"
    with pytest.raises(InstrumentError, match=message):
        class_activation_map(run, classifier="decoder.0")
    with pytest.raises(InstrumentError, match=r"the saved weights have no such name(.|\n)*decoder\.0"):
        class_activation_map(run, classifier="decoder.1")
    with pytest.raises(InstrumentError, match=r"those of its loss(.|\n)*forward\.of"):
        class_activation_map(run)
