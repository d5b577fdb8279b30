"""Conversion of nvidia-dlfw-inspect: the examples of its documentation, with other names and fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from converted_runs import Converter, record

from instrument.fields.globs import matches

BLOCKS = range(3)


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Converter:
    return Converter(tmp_path, "nvdlfw", capsys)


def names(suffix: str) -> tuple[str, ...]:
    return tuple(f"layers.{i}.{suffix}" for i in BLOCKS)


README = """
first:
  enabled: True
  layers:
    layer_name_regex_pattern: .*(fc1|qkv) # also matches in the middle of a name
  LogTensorStats:
    enabled: True
    type: [mean, std, l1_norm]
    tensors: [activation, weight, gradient]
"""


def test_statistics_of_selected_layers_are_recorded(convert: Converter) -> None:
    result = convert(README)
    assert result.content["reduce"] == "global"
    assert [*result.hooks] == ["first_activation", "first_weight", "first_gradient"]
    assert {tuple(spec["stats"]) for spec in result.hooks.values()} == {("mean", "std", "l1")}
    layers = [name for i in BLOCKS for name in (f"layers.{i}.self_attention.qkv", f"layers.{i}.mlp.fc1")]
    assert record(result.file) == {
        "first_activation": tuple(layers),
        "first_weight": tuple(f"{name}.weight" for name in layers),
        "first_gradient": tuple(layers),
    }
    assert result.has_note("std", "n - 1")
    assert result.has_note("activation", "output of the layer")


ENGINE = """
precision:
  enabled: True
  layers: {layer_types: [fc1, fc2]}
  transformer_engine:
    DisableFp8Gemm: {enabled: True, gemms: [fprop]}
    PerTensorScaling:
      enabled: True
      gemms_struct:
        - {gemm: dgrad, tensors: [gradient]}
    LogFp8TensorStats: {enabled: True, stats: [underflows%], tensors: [gradient], freq: 10}
    LogTensorStats:
      enabled: True
      stats: [cur_amax, dynamic_range, {max_blockwise_dynamic_range: {block_size: 32}}]
      tensors: [activation, weight, gradient, output, wgrad, dgrad]
      freq: 2
      start_step: 1
      end_step: 2
unused:
  enabled: False
  transformer_engine:
    LogTensorStats: {enabled: True, stats: [min], tensors: [weight]}
"""


def test_features_of_transformer_engine_select_linear_layers(convert: Converter) -> None:
    result = convert(ENGINE)
    selection = {"layers": "re:.*(fc1|fc2).*", "types": "*Linear", "kind": "forward_pre", "action": "record"}
    schedule = {"every": 2, "start": 2, "stop": 3}
    assert result.hooks["precision_activation"] == {**selection, **schedule, "stats": ["abs_max"]}
    for texts in (
        ("precision.transformer_engine.DisableFp8Gemm", "no counterpart"),
        ("precision.transformer_engine.PerTensorScaling", "no counterpart"),
        ("LogFp8TensorStats[gradient].stats", "underflows% is 100 underflow_fraction in the table casts"),
        ("LogTensorStats[output].stats", "'dynamic_range'"),
        ("LogTensorStats[output].stats", "'max_blockwise_dynamic_range'"),
        ("unused", "disabled in the source"),
    ):
        assert result.has_note(*texts), texts
    layers = tuple(f"layers.{i}.mlp.{name}" for i in BLOCKS for name in ("fc1", "fc2"))
    weights = tuple(f"{layer}.weight" for layer in layers)
    assert record(result.file) == {
        f"precision_{tensor}": weights if tensor in ("weight", "wgrad") else layers
        for tensor in ("gradient", "activation", "weight", "gradient_2", "output", "wgrad", "dgrad")
    }
    only = "a: {enabled: true, layers: {layer_types: [fc1]}, transformer_engine: {DisableFp8Layer: {enabled: true}}}"
    assert convert(only).hooks == {}


QUANTIZED = """
cast:
  enabled: True
  layers: {layer_types: [fc1]}
  transformer_engine:
    LogFp8TensorStats:
      enabled: True
      tensors_struct:
        - {tensor: activation, stats: [mxfp8_mse, fp8_delayed_scaling_overflows%, fp8_delayed_scaling_scale_inv_min]}
        - {tensor: gradient, stats: [mse, fp8_block_scaling_mse, underflows%_columnwise], freq: 2}
    LogNvfp4TensorStats: {enabled: True, tensors: [weight], stats: [underflows%, mse]}
"""


def test_statistics_of_quantized_tensors_become_casts(convert: Converter) -> None:
    result = convert(QUANTIZED)
    assert {name: (spec["kind"], spec["cast"]) for name, spec in result.hooks.items()} == {
        "cast_activation": ("forward_pre", {"to": "mxfp8_e4m3"}),
        "cast_activation_2": ("forward_pre", {"to": "float8_e4m3fn", "scale": "previous"}),
        "cast_gradient": ("full_backward_pre", {"to": "float8_e5m2", "scale": "previous"}),
        "cast_weight": ("step_pre", {"to": "nvfp4"}),
    }
    assert result.hooks["cast_gradient"]["every"] == 2
    for texts in (
        ("[activation]", "mxfp8_mse is quantization_error rms^2", "mxfp8_e4m3"),
        ("[gradient]", "mse: with delayed scaling, margin 1, from the previous recorded tensor"),
        ("[activation]", "fp8_delayed_scaling_scale_inv_min is 1 / scale"),
        ("[gradient]", "no counterpart for 'fp8_block_scaling_mse'"),
        ("[gradient]", "no counterpart for 'underflows%_columnwise'"),
    ):
        assert result.has_note(*texts), texts
    record(result.file)


STRUCT = """
sample:
  enabled: True
  layers: {layer_name_regex_pattern: .*(fc1|relu)}
  LogTensorStats:
    enabled: True
    tensors_struct:
      - {tensor: activation, stats: [max, min], freq: 4, start_step: 20, end_step: 40}
      - {tensor: gradient, stats: [mean], freq: 2, start_end_list: [[6, 10], [35, 42], [43, 44]]}
      - {tensor: relu_quant_act, stats: [mean]}
  own_namespace:
    FakeQuant: {enabled: True, gemms: [fprop]}
"""


def test_schedules_start_at_multiples_and_include_the_same_ends(convert: Converter) -> None:
    result = convert(STRUCT)
    schedules = {
        name: {key: spec[key] for key in ("every", "start", "stop") if key in spec}
        for name, spec in result.hooks.items()
    }
    assert schedules == {
        "sample_activation": {"every": 4, "start": 20, "stop": 41},  # an end step is included
        "sample_gradient": {"every": 2, "start": 6, "stop": 10},  # the end of an interval is not
        "sample_gradient_2": {"every": 2, "start": 36, "stop": 42},
    }
    assert result.has_note("LogTensorStats[gradient]", "no step from 43 to 44")
    assert result.has_note("no counterpart for the tensor 'relu_quant_act'")
    assert result.has_note("sample.own_namespace", "no counterpart")


def test_intervals_of_transformer_engine_include_their_ends(convert: Converter) -> None:
    feature = "LogTensorStats: {enabled: true, tensors: weight, stats: [min], start_end_list: [[0, 2], [4, 4]]}"
    result = convert(f"a: {{enabled: true, layers: {{layer_types: [all]}}, transformer_engine: {{{feature}}}}}")
    assert [(spec.get("start", 0), spec["stop"]) for spec in result.hooks.values()] == [(0, 3), (4, 5)]


DUMP = """
kept:
  enabled: True
  layers: {exact_layer_names: [layers.0.mlp.fc1, layers.1.mlp.fc1]}
  transformer_engine:
    FakeQuant: {enabled: True, gemms: [fprop], tensors: [activation], quant_format: FP8E4M3}
    DumpTensors:
      enabled: True
      tensors_struct:
        - {tensor: output, high_precision_tensor: True, quantized_tensor: True}
        - {tensor: weight, high_precision_tensor: False, quantized_tensor: False}
"""


def test_dumped_tensors(convert: Converter) -> None:
    result = convert(DUMP)
    assert record(result.file) == {"kept_output": ("layers.0.mlp.fc1", "layers.1.mlp.fc1")}
    assert result.hooks["kept_output"]["tensors"] is True
    assert result.has_note("FakeQuant", "no counterpart")
    assert result.has_note("quantized_tensor")


@pytest.mark.parametrize(
    ("layers", "matched"),
    [
        ("layer_types: [self_attention]", ("layers.1.self_attention", "layers.1.self_attention.proj")),
        ("layer_type: [self_attention]", ("layers.1.self_attention", "layers.1.self_attention.proj")),
        (
            "layer_numbers: [1]",
            ("layers.1", "layers.1.self_attention", "layers.1.self_attention.proj", "layers.1.mlp.fc1"),
        ),
        ("{layer_numbers: ['1-2', 10], layer_types: [mlp]}", ("layers.1.mlp.fc1", "layers.10.mlp.fc1")),
        ("layer_name_regex_pattern: ^layers\\.1.*fc1$", ("layers.1.mlp.fc1", "layers.10.mlp.fc1")),
        ("layer_name_regex_pattern: proj|0\\.mlp", ("layers.1.self_attention.proj", "layers.10.mlp.fc1")),
        ("layer_name_regex_pattern: '(?i)FC1'", ("layers.1.mlp.fc1", "layers.10.mlp.fc1")),
        ("exact_layer_names: [layers.1]", ("layers.1",)),
    ],
)
def test_layer_patterns_match_the_same_names(convert: Converter, layers: str, matched: tuple[str, ...]) -> None:
    given = layers if layers.startswith("{") else f"{{{layers}}}"
    feature = "LogTensorStats: {enabled: true, tensors: [output], stats: [min]}"
    pattern = convert(f"a:\n  enabled: true\n  layers: {given}\n  {feature}\n").hooks["a_output"]["layers"]
    everything = (
        *("head", "layers.1", "layers.1.self_attention", "layers.1.self_attention.proj"),
        *("layers.1.mlp.fc1", "layers.10.mlp.fc1"),
    )
    patterns = [pattern] if isinstance(pattern, str) else pattern
    assert tuple(name for name in everything if any(matches(each, name) for each in patterns)) == matched
