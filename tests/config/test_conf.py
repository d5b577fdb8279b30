"""Every file in conf/ composes, parses and builds its object."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import Calls
from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from tiers import tiered
from torch import nn
from training_runs import compose
from transformer_zoo import LOOKED_AT, NanoGPT

from instrument import ConfigError
from instrument.config.experiment import RunConfig
from instrument.fields.field_types import Target
from instrument.fields.targets import build
from instrument.plan.hook_plan import make_plan
from instrument.tasks import Outcome
from instrument.training.apply import apply_specs, build_module
from instrument.training.data import load_data
from instrument.training.experiment import Experiment, _build_optimizer
from instrument.training.models import DenseGAN, SparseAutoencoder

CONF = Path(__file__).parents[2] / "conf"
BASE = ("model=mnist_cnn", "data=digits")
COLOUR = (torch.zeros(2, 3, 32, 32), (2, 10))
INPUTS = {
    "resnet18": COLOUR,
    "vgg11": COLOUR,
    "vit": COLOUR,
    "autoencoder": (torch.zeros(2, 1, 8, 8), (2, 1, 8, 8)),
    "dense_gan": (torch.zeros(2, 16), (2, 1, 8, 8)),
    "tiny_gpt": (torch.zeros(2, 64, dtype=torch.int64), (2, 64, 128)),
    "attention_only": (torch.zeros(2, 16, dtype=torch.int64), (2, 16, 16)),
    "sparse_autoencoder": (torch.zeros(2, 32), (2, 32)),
}


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


def config_of(*overrides: str) -> RunConfig:
    return compose(*overrides)[0]


def config_with_option(group: str, option: str) -> RunConfig:
    rest = [override for override in BASE if not override.startswith(f"{group}=")]
    return config_of(*rest, f"{group}={option}")


def test_conf_groups_are_all_tested() -> None:
    tested = {"exp", "model", "data", "task", "optimizer", "scheduler", "train", "sink", "hooks", "apply", "rules"}
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir() and any(folder.glob("*.yaml"))} == tested


@pytest.mark.slow
def test_hydra_output_folders_are_separate_from_runs() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose_hydra("config", list(BASE), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    run, sweep = config.hydra.run.dir, config.hydra.sweep.dir
    assert (run.split("/")[:2], sweep.split("/")[:2]) == (["runs", "run"], ["runs", "run"])
    assert not config.hydra.job.chdir


# One experiment for each model and for each section that only some experiments have.
QUICK_EXPERIMENTS = (
    *("mnist_hooks", "autoencoder", "wgan_gp", "language", "induction", "resnet_features", "recurrent_gradients"),
    *("linear_functions", "state_dict", "head_ablation", "grad_cam", "gradient_tails", "exploding_gradient"),
)


@pytest.mark.usefixtures("skip_init")
@pytest.mark.parametrize("name", tiered(options("exp"), QUICK_EXPERIMENTS))
def test_experiment_composes_and_its_hooks_match_its_model(name: str) -> None:
    config = config_of(f"+exp={name}")
    assert config.name == name
    model = build_module(config.model, "model")
    apply_specs(config.apply, model)
    plan = make_plan(config.hooks, model)
    assert list(plan.specs) == list(config.hooks)
    assert all(plan.of(hook) for hook in config.hooks)


@pytest.mark.parametrize("file", sorted((CONF / "exp").glob("*.yaml")), ids=lambda file: file.stem)
def test_experiment_file_starts_with_its_command(file: Path) -> None:
    command = re.compile(rf"# (python|torchrun --nproc-per-node \d+) -m instrument (-m )?\+exp={file.stem}\b")
    assert any(command.match(line) for line in file.read_text().splitlines()[:2])


GROUPS = ["data", "model", "task", "optimizer", "scheduler", "train", "sink", "hooks", "apply", "rules"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_one_option_of_every_group_composes_with_an_experiment(which: int) -> None:
    chosen = {group: options(group)[which] for group in GROUPS}
    more = ["train.steps=null"] if chosen["train"] == "epochs" else []
    config = config_of("+exp=wgan_gp", *(f"{group}={option}" for group, option in chosen.items()), *more)
    assert config.name == "wgan_gp"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(len(options(group)) for group in GROUPS)))
def test_options_of_every_group_compose_with_experiments(number: int) -> None:
    experiment, *chosen = (options(group)[number % len(options(group))] for group in ("exp", *GROUPS))
    for group, option in zip(GROUPS, chosen, strict=True):
        # The experiments set `steps`; `epochs` requires `steps` to be null. Some hooks require an optimizer step, which the
        # mode of some experiments does not have.
        training = [
            "mode=train",
            "forward.grad=false",
            "forward.of=null",
            "forward.from_sample=null",
            "forward.integrate=false",
        ]
        more = ["train.steps=null"] if option == "epochs" else training if group == "hooks" else []
        more += ["data.dataset.run=.", "data.dataset.layer=fc"] if option == "recorded_tokens" else []
        try:
            config = config_of(f"+exp={experiment}", f"{group}={option}", *more)
        except ConfigError as error:  # an experiment may have a hook with the name of one in a set
            if not all("two configurations define this name" in problem.message for problem in error.problems):
                raise
        else:
            assert config.name == experiment


@pytest.fixture
def skip_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip weight initialisation, which is slow: some models have 130 million parameters."""
    for name in ("kaiming_uniform_", "kaiming_normal_", "normal_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *arguments, **named: tensor)


@pytest.mark.usefixtures("skip_init")
@pytest.mark.parametrize("name", options("model"))
def test_every_model_builds_and_accepts_its_input(name: str) -> None:
    model = build_module(config_with_option("model", name).model, "model").eval()
    inputs, output = INPUTS.get(name, (torch.zeros(2, 1, 28, 28), (2, 10)))
    result = model(inputs)
    assert (result[0] if isinstance(result, tuple) else result).shape == output


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["digits", "random"])
def test_data_without_download_loads(name: str) -> None:
    data = load_data(config_with_option("data", name).data)
    image, target = data.train[0]
    assert image.shape == ((1, 8, 8) if name == "digits" else (1, 28, 28))
    assert target in range(10)
    assert data.source["fallback"] is None


def test_mnist_loads_from_the_environment_folder(mnist_root: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if mnist_root is None:
        pytest.skip("MNIST is not on this disk")
    monkeypatch.setenv("INSTRUMENT_DATA", str(mnist_root))
    data = load_data(config_with_option("data", "mnist").data)
    assert (data.source["train_samples"], data.source["eval_samples"]) == (60_000, 10_000)
    assert data.train[0][0].shape == (1, 28, 28)


@pytest.mark.parametrize("name", tiered(["mnist", "fashion_mnist", "cifar10"], ["mnist"]))
def test_dataset_root_comes_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTRUMENT_DATA", "/some/where")
    assert config_with_option("data", name).data.dataset.to_config()["root"] == "/some/where"
    monkeypatch.delenv("INSTRUMENT_DATA")
    assert config_with_option("data", name).data.dataset.to_config()["root"] == "data"
    assert config_of("model=mnist_cnn", f"data={name}", "data.root=/else").data.dataset.to_config()["root"] == "/else"


def losses(layer: nn.Module, input: Any, targets: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
    """Return logits, or with targets a dict of losses."""
    logits = layer(input)
    return {"logits": logits} if targets is None else {"mean": logits.mean(), "square": logits.square().mean()}


TASK_INPUTS = {
    "huggingface": (
        Calls(losses, layer=nn.Linear(4, 10)),
        {"input": torch.randn(3, 4), "labels": torch.tensor([1, 9, 0])},
    ),
    "loss_dict": (Calls(losses, layer=nn.Linear(4, 10)), [torch.randn(3, 4), torch.tensor([1, 9, 0])]),
    "autoencoder": (nn.Linear(4, 4), [torch.randn(3, 4), torch.tensor([1, 9, 0])]),
    "sparse_autoencoder": (SparseAutoencoder(4, 8, k=2), {"x": torch.randn(3, 4)}),
    "next_token": (nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)), torch.randint(7, (3, 6))),
    "wgan_gp": (DenseGAN(image=(1, 4, 4)), [torch.randn(3, 1, 4, 4), torch.tensor([1, 9, 0])]),
}


@pytest.mark.parametrize("name", [name for name in options("task") if name not in ("generate", "forward")])
def test_every_task_returns_a_differentiable_loss(name: str) -> None:
    task = build(config_with_option("task", name).task, "task")
    model, batch = TASK_INPUTS.get(name, (nn.Linear(4, 10), [torch.randn(3, 4), torch.tensor([1, 9, 0])]))
    outcome = task(model, batch)
    assert isinstance(outcome, Outcome)
    outcome.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert sum(float(gradient.abs().sum()) for gradient in gradients if gradient is not None) > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", options("optimizer"))
def test_every_optimizer_takes_a_step(name: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in ("generator", "critic")})
    before = copy.deepcopy(model)
    optimizer = _build_optimizer(config_with_option("optimizer", name).optimizer, model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert all((now < was).all() for now, was in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", options("scheduler"))
def test_every_scheduler_is_built_on_the_optimizer(name: str) -> None:
    experiment = Experiment(config_of("model=mlp", "model.sizes=[64,10]", "data=digits", f"scheduler={name}"))
    if name == "none":
        assert experiment.scheduler is None
        return
    assert experiment.scheduler is not None
    (group,) = experiment.optimizer.param_groups
    first = group["lr"]
    for _ in range(experiment.steps):
        experiment.optimizer.step()
        experiment.scheduler.step()
    assert group["lr"] / first == pytest.approx({"cosine": 0.0, "step": 0.1}[name], abs=1e-9)


@pytest.mark.spread(1)
@pytest.mark.parametrize("group", ["train", "sink"])
def test_every_option_sets_its_values(group: str) -> None:
    expected = {"default": (100, None), "epochs": (None, 1), "parquet": None, "volume": "bytes"}
    for name in options(group):
        config = config_with_option(group, name)
        found = (config.train.steps, config.train.epochs) if group == "train" else config.sink.tensors
        assert found == expected[name], name


MODELS = {
    "transformer": NanoGPT,
    "low_precision": NanoGPT,
    "moe": next(each.make for each in LOOKED_AT if each.name == "Mixtral"),
}


@pytest.mark.parametrize("name", options("hooks"))
def test_every_hooks_option_matches_the_cnn_or_a_transformer(name: str) -> None:
    config = config_with_option("hooks", name)
    plan = make_plan(config.hooks, MODELS[name]() if name in MODELS else build_module(config.model, "model"))
    assert plan.specs
    assert all(plan.of(hook) for hook in plan.specs)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", options("apply"))
def test_every_apply_option_changes_the_model(name: str) -> None:
    config = config_with_option("apply", name)
    model = build_module(config.model, "model")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rectifiers = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    for module in rectifiers:
        module.inplace = True
    apply_specs(config.apply, model)
    changed = {key for key, value in model.state_dict().items() if not value.equal(before[key])}
    weights = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert changed == {"kaiming": weights, "no_inplace": set()}[name]
    assert [module.inplace for module in rectifiers] == [name != "no_inplace"] * len(rectifiers)


@pytest.mark.slow
def test_command_line_combines_changes_and_removes_hooks() -> None:
    config = config_of(*BASE, "hooks=[gradients,dead_relu]", "+hooks.mine={layers: '.', kind: forward, action: record}")
    assert list(config.hooks) == ["output_gradients", "parameter_gradients", "dead_relu", "mine"]
    compose_here = partial(config_of, "+exp=mnist_hooks")
    assert compose_here("hooks.tame.norm=0.1").hooks["tame"].norm == 0.1  # type: ignore[union-attr]
    assert "noisy" not in compose_here("~hooks.noisy").hooks
    assert "noisy" not in compose_here("hooks.noisy=null").hooks


TASKS = {
    "autoencoder": "autoencoder",
    "dense_gan": "wgan_gp",
    "tiny_gpt": "next_token",
    "attention_only": "next_token",
}
DATA: dict[str, tuple[str, ...]] = {
    "digits": ("data=digits",),
    "digits of 28": ("data=digits", "data.dataset.size=28"),
    "random": ("data=random",),
    "colour": ("data=random", "data.dataset.shape=[3,32,32]"),
    "english": ("data=english",),
    "repeated tokens": ("data=repeated_tokens",),
    "induction prompts": ("data=induction_prompts",),
}
FIT = {
    *{(model, data) for model in ("mlp", "rnn") for data in ("digits", "digits of 28", "random", "colour")},
    *{(model, data) for model in ("mnist_cnn",) for data in ("digits of 28", "random")},
    *{(model, "digits") for model in ("autoencoder", "dense_gan")},
    *{(model, "colour") for model in ("resnet18", "vgg11", "vit")},
    ("tiny_gpt", "english"),
    *{(model, data) for model in ("tiny_gpt", "attention_only") for data in ("repeated tokens", "induction prompts")},
}


PAIRS = [(model, data) for model in options("model") for data in DATA]
# One pair that fits for each task, each dataset in one pair, and one pair for each reason of a misfit.
QUICK = {
    *{("mlp", "digits"), ("mnist_cnn", "random"), ("autoencoder", "digits"), ("dense_gan", "digits")},
    *{("tiny_gpt", "english"), ("attention_only", "repeated tokens"), ("attention_only", "induction prompts")},
    *{("mnist_cnn", "digits"), ("mlp", "english"), ("autoencoder", "colour"), ("tiny_gpt", "digits")},
}


@pytest.mark.spread(1)
@pytest.mark.usefixtures("skip_init")
@pytest.mark.parametrize("pair", tiered(PAIRS, QUICK))
def test_every_model_accepts_data_or_reports_the_misfit(pair: tuple[str, str]) -> None:
    model, data = pair
    task = f"task={TASKS.get(model, 'cross_entropy')}"
    config = config_of(f"model={model}", *DATA[data], task, "hooks=gradients", "train.batch_size=2")
    if (model, data) in FIT:
        assert Experiment(config).plan.sites
        return
    with pytest.raises(ConfigError) as caught:
        Experiment(config)
    (problem,) = caught.value.problems
    assert problem.where in ("data, model", "task")
    assert problem.given


def test_mlp_infers_its_first_size_from_the_data() -> None:
    experiment = Experiment(config_of("model=mlp", "data=digits", "train.steps=1"))
    first = next(experiment.model.parameters())
    assert (type(experiment.model.layers[0][0]), first.shape) == (nn.Linear, (128, 64))  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="only the first size, that of the input, may be null"):
        Experiment(config_of("model=mlp", "model.sizes=[64,null,10]", "data=digits"))


def test_text_for_a_number_is_not_the_reason_of_another_error() -> None:
    """A convolution takes `padding: same`, although its default is a number."""
    convolution = {"_target_": "torch.nn.Conv2d", "in_channels": 1, "kernel_size": 3, "padding": "same"}
    assert build(Target.model_validate({**convolution, "out_channels": 2}), "model").padding == "same"
    with pytest.raises(ConfigError, match=r"model: torch\.nn\.Conv2d could not be built: .*'out_channels'"):
        build(Target.model_validate(convolution), "model")
