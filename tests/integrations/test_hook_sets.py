"""The hook sets `transformer`, `moe` and `low_precision`, on models of several libraries and styles, and in the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
import torchvision
from architectures import Architecture
from conftest import Answer
from hook_runs import refused, run_step
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_zoo import (
    EXPERTS,
    HEADS,
    LAYERS,
    LENGTH,
    LOOKED_AT,
    SET_ASIDE,
    VOCABULARY,
    D,
    Example,
    LectureGPT,
    NanoGPT,
    SwitchLayer,
    XTransformer,
    nano_with,
)

import instrument
from instrument.config.spec_file import hook_sets, read_rules, read_specs
from instrument.tables.reasons import NO_OPTIONAL_FUNCTION

EXAMPLES = {example.name: example for example in (*LOOKED_AT, *SET_ASIDE)}
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    """Return a loss of a language model, or of an encoder of vectors."""
    if isinstance(model, nn.TransformerEncoder):
        return model(F.one_hot(TOKENS % D, D).float()).square().mean()
    output = model(TOKENS) if not hasattr(model, "config") else model(input_ids=TOKENS, labels=TOKENS)
    return output.square().mean() if isinstance(output, Tensor) else output.loss


def train(model: nn.Module, specs: Any, steps: int = 1, lr: float = 0.1) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


def rows(probe: Any, hook: str) -> pd.DataFrame:
    return probe.stats[probe.stats["hook"] == hook]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "name", ["GPT-2", "Llama", "BERT", "T5", "Mixtral", "nn.TransformerEncoder", "nanoGPT", "minGPT"]
)
def test_transformer_set_records_every_head_and_block(name: str) -> None:
    example: Example = EXAMPLES[name]
    probe = train(example.make(), "transformer")
    parts, found = example.parts, probe.stats.groupby("hook").size()
    assert found["attention"] == found["attention_scores"] == parts["attention"] * HEADS
    assert found["residual_changes"] == parts["block"]
    assert rows(probe, "residual_stream")["layer"].nunique() == parts["block"]
    assert rows(probe, "norm_gains")["layer"].nunique() == parts["norm"]
    assert found.get("logits", 0) == parts.get("head", 0)
    assert set(rows(probe, "attention")["path"].str.rpartition(":")[2]) == {*map(str, range(HEADS))}
    numbers = rows(probe, "attention")[["row_entropy", "row_uniformity", "first_fraction"]]
    assert not numbers.isna().any().any()
    assert numbers["row_uniformity"].between(0, 1 + 1e-6).all()


def test_masks_are_in_no_number_of_the_transformer_set() -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=D, n_layer=1, n_head=HEADS)
    probe = train(transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager"), "transformer")
    numbers = rows(probe, "attention_scores").select_dtypes("float64")  # the masks have the smallest float32
    assert 0 < float(numbers.max(axis=None)) < 100


def test_transformer_set_has_the_numbers_of_torch() -> None:
    torch.manual_seed(0)
    model = NanoGPT()
    block = model.transformer["h"][0]
    caught: dict[str, Tensor] = {}
    block.attn.c_attn.register_forward_hook(lambda module, args, output: caught.update(qkv=output.detach()))
    block.register_forward_hook(lambda module, args, output: caught.update(x=args[0].detach(), y=output.detach()))
    model.lm_head.register_forward_hook(lambda module, args, output: caught.update(logits=output.detach()))
    probe = train(model, "transformer")
    q, k, _ = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in caught["qkv"].double().chunk(3, -1))
    scores = (q @ k.mT / (D // HEADS) ** 0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    of_block = {
        hook: rows(probe, hook).query("layer == 'transformer.h.0.attn'") for hook in ("attention", "attention_scores")
    }
    expected = {
        "row_entropy": entropy.mean((0, 2)),
        "row_uniformity": (entropy[..., 1:] / torch.arange(2, LENGTH + 1).log()).mean((0, 2)),
        "first_fraction": weights[:, :, 1:, 0].mean((0, 2)),
    }
    for name, wanted in expected.items():
        assert of_block["attention"][name].tolist() == pytest.approx(wanted.tolist(), rel=1e-5)
    of_arguments = rows(probe, "queries_and_keys").query("layer == 'transformer.h.0.attn'")["rms"].tolist()
    assert of_arguments == pytest.approx([float(each.square().mean().sqrt()) for each in (q, k)], rel=1e-5)
    assert of_block["attention_scores"]["max"].tolist() == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)
    x, y = caught["x"].double(), caught["y"].double()
    change = rows(probe, "residual_changes").iloc[0]
    assert change["branch_ratio"] == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-5)
    assert change["input_cosine"] == pytest.approx(float(F.cosine_similarity(x.flatten(), y.flatten(), 0)), rel=1e-5)
    logits = caught["logits"].double()
    found = rows(probe, "logits").iloc[0]
    assert found["z_loss"] == pytest.approx(float(logits.logsumexp(-1).square().mean()), rel=1e-5)
    assert found["softmax_entropy"] == pytest.approx(
        float(torch.special.entr(logits.softmax(-1)).sum(-1).mean()), rel=1e-5
    )


def test_transformer_set_leaves_out_what_a_model_lacks() -> None:
    probe = train(XTransformer(), "transformer")  # its residual connections are in no module
    assert set(probe.stats["hook"]) == {
        *("attention", "attention_scores", "norm_gains", "logits", "embeddings", "embedding_gradients"),
    }
    causes = {row["cause"] for row in probe.coverage() if row["hook"] == "queries_and_keys"}
    assert causes == {NO_OPTIONAL_FUNCTION}
    messages = probe.events[probe.events["rule"] == "structure"]["message"]
    assert [*messages] == [
        f"hook '{hook}' is left out: the model has no block" for hook in ("residual_changes", "residual_stream")
    ]


def test_attention_without_a_dimension_of_heads_has_one_row_per_module() -> None:
    probe = train(LectureGPT(), "transformer")
    assert [*rows(probe, "attention")["path"]] == ["softmax.0:0"] * (LAYERS * HEADS)


@pytest.mark.slow
def test_hook_set_can_be_in_a_section_next_to_rules() -> None:
    specs = {"hooks": "transformer", "rules": {"non_finite": None}}
    assert read_specs(specs) == read_specs("transformer")
    assert read_rules(specs) == read_rules({}, {"non_finite": None})


def test_hook_sets_do_not_change_the_training() -> None:
    results = []
    for specs in ({}, "transformer"):
        torch.manual_seed(0)
        model = EXAMPLES["GPT-2"].make()
        if specs:
            train(model, specs, steps=3)
        else:
            with pytest.warns(instrument.InstrumentWarning, match="no hook"):
                train(model, specs, steps=3)
        results.append((model.state_dict(), torch.get_rng_state()))
    (bare, bare_state), (hooked, state) = results
    assert all(torch.equal(bare[name], hooked[name]) for name in bare)
    assert torch.equal(bare_state, state)


def test_moe_set_records_the_load_of_the_experts() -> None:
    model = EXAMPLES["Mixtral"].make()
    logits: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    probe = train(model, "moe")
    loads = probe.run.experts.query("path == '0'")["load"]
    for load, of_layer in zip(loads, logits, strict=True):
        chosen = of_layer.topk(2, dim=-1).indices
        assert [*load] == pytest.approx((chosen.flatten().bincount(minlength=EXPERTS) / chosen.numel()).tolist())
    entropies = [float(torch.special.entr(each.softmax(-1)).sum(-1).mean()) for each in logits]
    assert rows(probe, "router_logits")["softmax_entropy"].tolist() == pytest.approx(entropies, rel=1e-5)
    assert len(rows(probe, "router_gradients")) == LAYERS


def test_moe_set_requires_the_experts_per_token_of_a_plain_router() -> None:
    model = nano_with(SwitchLayer)
    specs = {name: spec.model_dump(exclude_unset=True) for name, spec in read_specs("moe").items()}
    message = refused(model, specs)
    assert "the number of experts per token is unknown at transformer.h.0.mlp.switch (Linear)" in message
    specs["load"]["experts"] = 1
    assert len(train(model, specs).run.experts) == LAYERS


def test_low_precision_set_records_the_operands_of_products() -> None:
    model = NanoGPT()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    weights = {name: module.weight.detach().clone() for name, module in model.named_modules() if name in linear}
    hooks = {
        name: {**spec.model_dump(exclude_unset=True), "every": 1} for name, spec in read_specs("low_precision").items()
    }
    table = train(model, ["transformer", hooks], steps=2, lr=0.0).run.casts
    layers = table.groupby("hook")["layer"].agg(set)
    assert layers.pop("attention_fp8") == {f"transformer.h.{i}.attn" for i in range(LAYERS)}
    assert set(layers.index) == {
        f"{name}_{way}" for name in ("weights", "inputs", "gradients") for way in ("fp8", "mx")
    }
    assert all(each == linear for each in layers)
    assert table.query("step == 0 and hook.str.contains('fp8')")["quantization_error"].isna().all()
    assert table.query("step == 1")["quantization_error"].notna().all()
    for row in table.query("step == 1 and hook == 'weights_fp8'").itertuples():
        weight = weights[row.layer]
        scale = 224 / weight.abs().max()
        cast = (weight * scale).to(torch.float8_e4m3fn).double() / scale
        error = (cast - weight).square().sum() / weight.double().square().sum()
        assert row.quantization_error == pytest.approx(error.item(), rel=1e-5)


@pytest.mark.slow
def test_rules_on_casts_report_nothing_in_a_healthy_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rules = {name: {"rule": name} for name in ("underflow", "overflow", "quantization_error")}
    with instrument.attach(model, "low_precision", optimizer=optimizer, rules=rules) as probe:
        for _ in range(61):
            x = torch.randn(256, 16)
            optimizer.zero_grad()
            loss = 1e-6 * nn.functional.cross_entropy(
                model(x), x[:, :4].argmax(1)
            )  # as with a small weight of the loss
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    assert set(probe.run.events["rule"]) == {"structure"}
    fp8 = probe.run.casts.query("hook.str.contains('fp8')")
    assert fp8.query("step == 0")[["scale", "underflow_fraction", "quantization_error"]].isna().all(axis=None)
    assert fp8.query("step > 0")["quantization_error"].between(1e-5, 4e-3).all()


def test_low_precision_set_ignores_blocks_that_contain_products() -> None:
    model = nn.Sequential(torchvision.ops.Conv2dNormActivation(3, 4), nn.ConvTranspose2d(4, 3, 3))
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    _, probe = run_step(model, "low_precision", x, loss=torch.sum, optimizer=torch.optim.SGD(model.parameters()))
    layers = {row["layer"] for row in probe.sink.records("casts")}
    assert layers == {"0.0", "1"}


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "part"), [("transformer", "attention"), ("moe", "router")])
def test_hook_set_on_a_convolutional_network_is_an_error(name: str, part: str) -> None:
    assert f"no {part} found" in refused(Architecture("torchvision", "resnet18").make(), name)


def test_unknown_hook_set_lists_the_others() -> None:
    message = refused(nn.Linear(1, 1), "transfomer")
    assert f"a hook set: {', '.join(hook_sets())}" in message
    assert "similar  transformer" in message


def test_list_joins_hook_sets_and_named_specs() -> None:
    mine = {"mine": {"layers": "**", "kind": "forward", "action": "record"}}
    names = [*read_specs("gradients"), *read_specs("dead_relu"), "mine"]
    assert [*read_specs(["gradients", "dead_relu", mine])] == names
    assert [*read_specs(["gradients", {"output_gradients": None}])] == ["parameter_gradients"]
    model = nn.Linear(1, 1)
    unknown = refused(model, ["gradients", "gradient"])
    assert "no hook set has this name" in unknown
    assert "similar  gradients" in unknown
    message = refused(model, ["activations", {"activations": mine["mine"]}])
    assert "hooks.activations: several entries have" in message
    assert "rename one" in message
    assert "a mapping from names to specs" in refused(model, ["gradients", [mine["mine"]]])


def test_file_precedes_the_hook_set_of_its_name(workdir: Any) -> None:
    (workdir / "moe").write_text("mine: {layers: '.', kind: forward, action: record}")
    assert [*read_specs("moe")] == ["mine"]


@pytest.mark.slow
def test_transformer_set_in_the_command_line(cli: Callable[..., Answer]) -> None:
    plan = cli("+exp=language", "hooks=transformer", "plan=true").expect(0)
    assert "self_attn MultiheadAttention  3,168 parameters  [16, 64, 32]  attention, attention_scores" in plan.out
    answer = cli("model=mnist_cnn", "data=digits", "hooks=transformer", "plan=true").expect(2)
    assert "hooks.attention.structure: no attention found" in answer.err


def test_set_without_an_optimizer_names_the_hooks_to_remove() -> None:
    model = NanoGPT()
    with pytest.raises(instrument.ConfigError) as caught, instrument.attach(model, "transformer"):
        pass
    removed = {problem.where.split(".")[1]: None for problem in caught.value.problems}
    assert list(removed) == ["norm_gains", "embeddings", "embedding_gradients"]
    assert all(f'"{name}": None' in str(caught.value) for name in removed)
    with instrument.attach(model, ["transformer", removed]) as probe:
        loss_of(model)
    assert "residual_stream" in set(probe.stats.hook)
