"""The private parts of Hydra, and overrides of known fields that no file defines: in single runs, sweeps and their jobs."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra._internal.hydra
import pytest
from fast_composition import composition
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins import basic_launcher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from instrument import ConfigError
from instrument.commands import verify
from instrument.config.experiment import RunConfig
from instrument.config.hydra_internals import FieldLoader, TaskRepository, check_options, config_loader
from instrument.config.parse import parse_config
from instrument.config.schema import fields_below
from instrument.config.spec_file import conf_folder
from instrument.training.sweep_jobs import expand_sweep

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2", "quiet=true")
MINE = "+hooks.mine={layers:layers.0,kind:forward,action:record}"


def composed(*overrides: str, mode: RunMode = RunMode.RUN) -> tuple[FieldLoader, DictConfig]:
    setup_globals()
    loader = FieldLoader(create_config_search_path(str(conf_folder())))
    given = ["+exp=mnist_hooks", "data=digits", *overrides]
    return loader, loader.load_configuration("config", overrides=given, run_mode=mode)


def parsed(config: DictConfig) -> RunConfig:
    return parse_config({key: _plain(config[key]) for key in config if key != "hydra"})


def text_of(config: Any) -> str:
    """Return the keys and values of a configuration in order, without resolving its interpolations."""
    return repr(OmegaConf.to_container(config))


def nodes_of(node: Any) -> Iterator[tuple[str, object]]:
    """Yield each node of a configuration in order, with its types and flags."""
    fields = dict(vars(node._metadata))
    fields.pop("resolver_cache", None)  # times
    yield node._get_full_key(None), fields
    if OmegaConf.is_dict(node) and not node._is_none() and not node._is_missing():
        for key in node:
            yield from nodes_of(node._get_node(key))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@pytest.mark.slow
def test_known_fields_are_overridden_without_a_plus() -> None:
    overrides = [
        *("hooks.tame.every=5", "hooks.tame.scope=tensor", "hooks.noisy.heads.of=4", "hooks.noisy.heads.take=[0,3]"),
        *("hooks.noisy.mean=0.5", "hooks.activations.tensors=true"),
        *("data.slice.stride=2", "data.slice.classes=[1,2]", "data.eval_slice.stop=64", "data.fallback=digits"),
        *("sink.keep_local=true", "sink.mlflow=true", "train.find_unused_parameters=true", "train.checkpoint.every=7"),
        *("budget.time=5%", "apply.init.mode=fan_out", "apply.init.exclude=encoder.0", MINE, "hooks.mine.every=9"),
    ]
    config = parsed(composed(*overrides)[1])
    assert config.hooks["tame"].every == 5
    assert config.hooks["mine"].every == 9
    assert (config.hooks["noisy"].heads.of, config.hooks["noisy"].heads.take) == (4, (0, 3))
    assert (config.data.slice.stride, config.data.slice.classes, config.data.eval_slice.stop) == (2, (1, 2), 64)
    assert (config.train.checkpoint.every, config.budget.time, config.sink.mlflow) == (7, 0.05, True)
    assert config.apply["init"].model_extra == {"nonlinearity": "relu", "mode": "fan_out"}


def test_every_field_of_every_section_is_known() -> None:
    sections = [("train",), ("train", "checkpoint"), ("sink",), ("budget",), ("data",), ("data", "slice")]
    for path in sections:
        fields = {field.alias or name for name, field in _model(path).model_fields.items()}
        assert set(fields_below(path)) == fields, path
    assert {"every", "norm", "fn", "std", "dim", "slice", "unit_dim"} <= set(fields_below(("hooks", "tame")))
    assert {"fn", "std", "nonlinearity", "value", "module"} <= set(fields_below(("apply", "init")))
    assert fields_below(("model",)) == fields_below(("optimizer",)) == fields_below(("hooks", "tame", "fn")) == ()


def _model(path: tuple[str, ...]) -> Any:
    from instrument.config.schema import model_at

    return model_at(RunConfig, path)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "override",
    ["hooks.tmae.every=5", "hooks.tame.evry=5", "hooks.tame.heads.fo=5", "data.slice.stp=1", "optimizr.lr=1"],
)
def test_unknown_keys_are_refused(override: str) -> None:
    with pytest.raises(ConfigCompositionException):
        composed(override)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "overrides", [["+hooks.tame={norm: 5}"], ["+apply.init={mode: fan_out}"], [MINE, "+hooks.mine={every: 2}"]]
)
def test_plus_refuses_an_existing_spec(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"(hooks|apply)\.\w+: exists already(.|\n)*fix .*without \+ changes"):
        composed(*overrides)


@pytest.mark.slow
def test_specs_are_removed_and_added_again() -> None:
    spec = {"layers": "layers.0", "kind": "forward", "action": "record"}
    for removal in ("~hooks.tame", "hooks.tame=null"):
        config = composed(removal, MINE.replace("mine", "tame"), "hooks.tame.every=3")[1]
        assert OmegaConf.to_container(config.hooks.tame) == {**spec, "every": 3}
        given = [removal, MINE.replace("mine", "tame"), "hooks.tame.every=3"]
        assert list(config.hydra.overrides.task) == ["+exp=mnist_hooks", "data=digits", *given]
    left = parsed(composed("~hooks", "~apply", MINE)[1])
    assert (list(left.hooks), list(left.apply)) == (["mine"], [])


@pytest.mark.slow
def test_pickled_loader_composes_the_same_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hydra keeps the first classes of its sources if a launcher imports the plugins again, and cannot pickle them.
    sources = SourcesRegistry.instance().types
    latest = {scheme: getattr(sys.modules[kind.__module__], kind.__name__) for scheme, kind in sources.items()}
    monkeypatch.setattr(SourcesRegistry.instance(), "types", latest)
    loader, config = composed("hooks.tame.every=5,6", "hydra.sweep.dir=out", mode=RunMode.MULTIRUN)
    copy = pickle.loads(pickle.dumps(loader))
    job = copy.load_sweep_config(config, ["+exp=mnist_hooks", "data=digits", "hooks.tame.every=6"])
    assert parsed(job).hooks["tame"].every == 6


def test_sweep_values_of_a_single_run_are_refused() -> None:
    loader = composed()[0]
    overrides = ["hooks=activations", "seed=5,6"]
    loader.load_configuration("config", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
    with pytest.raises(ConfigCompositionException, match="Ambiguous"):
        loader.load_configuration("config", [*overrides, "hydra.mode=RUN"], RunMode.RUN)


@pytest.mark.slow
def test_sweep_values_take_known_fields(workdir: Path) -> None:
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text(
        "# @package _global_\nhydra: {sweeper: {params: {hooks.mine.every: '1,2'}}}\n"
        "hooks: {mine: {layers: layers.0, kind: forward, action: record}}\n"
    )
    loader = config_loader()
    overrides = ["+exp=mine", *TINY, "hooks.mine.start=0,1", "hydra.sweep.dir=out"]
    config = loader.load_configuration("config", overrides, RunMode.MULTIRUN)
    jobs = [parsed(loader.load_sweep_config(config, list(job))).hooks["mine"] for job in expand_sweep(config.hydra)]
    assert sorted((hook.every, hook.start) for hook in jobs) == [(1, 0), (1, 1), (2, 0), (2, 1)]


RMSPROP = {"_target_": "torch.optim.RMSprop", "lr": 0.01}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["+exp=mine"], RMSPROP),
        (["+exp=mine", "optimizer.lr=0.5"], {**RMSPROP, "lr": 0.5}),
        (["+exp=mine", "optimizer={_target_:torch.optim.SGD}"], {"_target_": "torch.optim.SGD"}),
        (["optimizer={_target_:torch.optim.SGD,lr:1}"], {"_target_": "torch.optim.SGD", "lr": 1}),
        (["optimizer={lr:1}"], {"_target_": "torch.optim.SGD", "lr": 1, "momentum": 0.9}),
        (["+exp=mine", "optimizer=adam"], {"_target_": "torch.optim.Adam", "lr": 0.001, "betas": [0.9, 0.999]}),
        (
            ["+exp=mine", "optimizer=adam", "optimizer.lr=2"],
            {"_target_": "torch.optim.Adam", "lr": 2, "betas": [0.9, 0.999]},
        ),
        (["+exp=mine", "~optimizer", "+optimizer={_target_:torch.optim.SGD}"], {"_target_": "torch.optim.SGD"}),
        (["optimizer=both"], {"_target_": "torch.optim.Adagrad", "lr": 0.1}),
        (["+exp=mine", "optimizer=both", "optimizer.lr=0.5"], {"_target_": "torch.optim.Adagrad", "lr": 0.5}),
        (["+exp=two", "optimizer@critic=adam"], RMSPROP),
        (["+exp=two", "~optimizer@critic"], RMSPROP),
        (["+exp=inherits"], {"_target_": "torch.optim.Adam", "lr": 0.2}),
        (["+exp=tunes"], {**RMSPROP, "lr": 0.2, "alpha": 0.9}),
    ],
)
def test_target_replaces_the_arguments_of_the_default(
    workdir: Path, overrides: list[str], expected: dict[str, Any]
) -> None:
    """The momentum of the default optimizer does not become an argument of another one, and the command line wins."""
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text(f"# @package _global_\noptimizer: {RMSPROP}\n")
    Path("conf/exp/two.yaml").write_text("# @package _global_\ndefaults: [mine, /optimizer@critic: sgd, _self_]\n")
    for name, target in (("inherits", "Adam"), ("tunes", "RMSprop")):
        own = {"_target_": f"torch.optim.{target}", "lr": 0.2}
        Path(f"conf/exp/{name}.yaml").write_text(f"# @package _global_\ndefaults: [slower, _self_]\noptimizer: {own}\n")
    Path("conf/exp/slower.yaml").write_text(
        "# @package _global_\ndefaults: [mine, _self_]\noptimizer: {lr: 0.001, alpha: 0.9}\n"
    )
    Path("conf/optimizer").mkdir()
    Path("conf/optimizer/both.yaml").write_text(
        "# @package _global_\noptimizer: {_target_: torch.optim.Adagrad, lr: 0.1}\n"
    )
    config = config_loader().load_configuration("config", overrides, RunMode.RUN)
    assert _plain(config.optimizer) == expected


@pytest.mark.parametrize("override", ["scheduler=none", "~scheduler"])
def test_scheduler_of_an_experiment_is_removed(override: str) -> None:
    config = config_loader().load_configuration("config", ["+exp=leaky_relu", override], RunMode.RUN)
    assert config.get("scheduler") is None


def test_removed_scheduler_that_is_also_selected_is_refused() -> None:
    for overrides in (["~scheduler", "scheduler=cosine"], ["+exp=leaky_relu", "scheduler=cosine", "~scheduler"]):
        with pytest.raises(ConfigError, match="scheduler: the section is removed and a file is selected for it"):
            config_loader().load_configuration("config", overrides, RunMode.RUN)


def test_rules_none_removes_the_rules_of_an_experiment(workdir: Path) -> None:
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text("# @package _global_\nrules: {nan: {rule: non_finite}}\n")
    more = "+rules.large={watch: metrics, stat: loss, above: 9}"
    for overrides, names in (([], set()), ([more], {"large"})):
        config = config_loader().load_configuration("config", ["+exp=mine", "rules=none", *overrides], RunMode.RUN)
        assert {*(config.rules or ())} == names


def test_verify_takes_known_fields(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.commands.hydra_main.command", lambda job: verify.main())
    answer = cli(*TINY, MINE, "hooks.mine.every=2", "data.slice.per_class=9")
    assert answer.code == 0, answer.err
    assert "EQUAL" in answer.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["hydra/launcher=joblib", "hydra/job_logging=disabled", "hydra.job.chdir=true"],
    ],
)
def test_composition_equals_that_of_hydra(overrides: list[str]) -> None:
    given = ["+exp=mnist_hooks", "model=mlp", *overrides]
    configs = []
    for kind, fast in ((ConfigLoaderImpl, False), (FieldLoader, False), (FieldLoader, True), (FieldLoader, True)):
        with composition(fast=fast):
            loader = kind(create_config_search_path(str(conf_folder())))
            configs.append(loader.load_configuration("config", list(given), RunMode.RUN))
    assert len({text_of(config) for config in configs}) == 1
    assert all([*nodes_of(config)] == [*nodes_of(configs[0])] for config in configs)


@pytest.mark.slow
def test_checked_job_equals_one_that_is_composed() -> None:
    loader, config = composed("hooks.tame.every=5,6", "hydra.sweep.dir=out", mode=RunMode.MULTIRUN)
    sweeper: Any = SimpleNamespace(config=config, hydra_context=HydraContext(loader, Callbacks()))
    job = ["+exp=mnist_hooks", "data=digits", "hooks.tame.every=6"]
    Sweeper.validate_batch_is_legal(sweeper, [job])
    checked, again = (loader.load_sweep_config(config, list(job)) for _ in range(2))
    assert checked is not again
    assert text_of(checked) == text_of(again)
    assert [*nodes_of(checked)] == [*nodes_of(again)]


def test_schemas_may_be_local_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Model:
        width: int = 3

    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    ConfigStore.instance().store(name="local", group="model", node=Model)
    assert composed("model=local")[1].model == Model()


def test_schema_applies_to_compositions_after_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    assert "added" not in composed("model=mlp")[1].model
    ConfigStore.instance().store(name="mlp", group="model", node={"added": 1})
    with pytest.warns(UserWarning, match="ConfigStore schema with the same name"):
        assert composed("model=mlp")[1].model.added == 1


@pytest.mark.slow
def test_plugins_may_be_imported_again() -> None:
    before = composed()[1]
    Singleton.set_state(Singleton.get_state())  # as a launcher does for each job in the same process
    after = composed()[1]
    assert OmegaConf.get_type(after.hydra.launcher) is basic_launcher.BasicLauncherConf
    assert text_of(after) == text_of(before)


@pytest.mark.slow
def test_defaults_list_may_name_another_choice(tmp_path: Path) -> None:
    for name, text in {
        "config.yaml": "defaults: [data: small, model: '${data}_net', _self_]",
        "data/small.yaml": "size: 1",
        "data/large.yaml": "size: 9",
        "model/small_net.yaml": "width: 2",
        "model/large_net.yaml": "defaults: [/data@given: '${data}']\nwidth: 8",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    setup_globals()
    for overrides in ([], ["data=large"]):
        configs = []
        for kind in (ConfigLoaderImpl, FieldLoader):
            loader = kind(create_config_search_path(str(tmp_path)))
            config = loader.load_configuration("config", overrides=list(overrides), run_mode=RunMode.RUN)
            configs.append({key: config[key] for key in config if key != "hydra"})
        assert configs[0] == configs[1]
    assert configs[1] == {"data": {"size": 9}, "model": {"given": {"size": 9}, "width": 8}}


@composition(fast=False)
def test_private_parts_of_hydra_have_the_expected_form() -> None:
    """A new version of Hydra that changes one of them fails here, and not in a run."""
    loader = ConfigLoaderImpl
    assert hydra._internal.hydra.ConfigLoaderImpl is loader  # type: ignore[attr-defined]
    parameters = {
        loader._parse_overrides_and_create_caching_repo: ["self", "config_name", "overrides"],
        loader._compose_config_from_defaults_list: ["self", "defaults", "repo"],
        ConfigRepository.load_config: ["self", "config_path"],
        ConfigRepository._find_object_source: ["self", "config_path", "object_type"],
        BasicSweeper.split_arguments: ["overrides", "max_batch_size"],
        Callbacks.__init__: ["self", "config"],
        Override._convert_value: ["value"],
    }
    assert {function: [*inspect.signature(function).parameters] for function in parameters} == parameters
    assert isinstance(config_loader().repository, TaskRepository)  # type: ignore[attr-defined]


def test_abbreviated_options_are_refused() -> None:
    """The parser of Hydra takes `--exp` for `--experimental-rerun`."""
    check_options(["-m", "--cfg", "job", "--config-dir=conf", "--", "+exp=--exp"])
    for arguments in (["--exp", "mnist_hooks"], ["-m", "--exp=mnist_hooks"]):
        with pytest.raises(ConfigError, match=r"--exp: unknown option\n.*without dashes"):
            check_options(arguments)
