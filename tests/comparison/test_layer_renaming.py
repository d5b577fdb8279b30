"""Layers with other names in another run: mappings and suggestions."""

from __future__ import annotations

import pytest

from instrument.comparison.layer_renaming import renamed_layers, suggested_renaming
from instrument.errors import ConfigError

LAYERS = ["", "encoder", "encoder.0", "encoder.0.conv", "encoder.1.conv", "h.3.mlp.up", "head"]


@pytest.mark.parametrize(
    ("rename", "layer", "name"),
    [
        ({"encoder": "backbone"}, "encoder.0.conv", "backbone.0.conv"),
        ({"encoder": "backbone"}, "head", "head"),
        ({"encoder.*.conv": "stages.*.c"}, "encoder.1.conv", "stages.1.c"),
        ({"encoder": "x", "encoder.0": "y.z"}, "encoder.0.conv", "y.z.conv"),
        ({"h.*.mlp": "blocks.*.ffn"}, "h.3.mlp.up", "blocks.3.ffn.up"),
        ({"**.conv": "**.c"}, "encoder.1.conv", "encoder.1.c"),
        ({"h*": "g*"}, "head", "gead"),
        ({".": "model"}, "encoder.0", "model.encoder.0"),
        ({".": "model"}, "", "model"),
        ({"encoder": "."}, "encoder.0.conv", "0.conv"),
        ({"encoder": "."}, "encoder", ""),
    ],
)
def test_layer_gets_the_name_of_the_other_run(rename: dict[str, str], layer: str, name: str) -> None:
    layers = [each for each in LAYERS if each or rename != {"encoder": "."}]
    others = [name, *(new for new in rename.values() if "*" not in new)]
    assert renamed_layers(rename, layers, others)[layer] == name


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"encodr": "backbone"}, "rename encodr=backbone: matches no recorded layer of A"),
        ({"encodr": "backbone"}, "similar  encoder"),
        ({"encoder": "missing"}, "rename encoder=missing: no recorded layer of B has the new name"),
        ({"encoder.*": "backbone"}, "both names must contain the same wildcards"),
        ({"encoder.**": "backbone.*"}, "both names must contain the same wildcards"),
        ({"": "backbone"}, "a name has an empty segment"),
        ({"encoder": "a..b"}, "a name has an empty segment"),
        ({"encoder.0": "backbone", "head": "backbone"}, "several layers of A get the name backbone"),
    ],
)
def test_invalid_entry_is_reported(rename: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        renamed_layers(rename, LAYERS, ["backbone", "backbone.conv"])
    assert message in str(error.value)


def test_suggestions_match_all_layers_that_they_can() -> None:
    one = {"": "Net", "encoder.0": "Conv2d", "encoder.1": "ReLU", "head": "Linear"}
    other = {"": "Net", "features.0": "Conv2d", "features.1": "ReLU", "out": "Linear"}
    assert suggested_renaming(one, other, {}) == {"encoder": "features", "head": "out"}
    assert suggested_renaming(one, other, {"encoder": "features"}) == {"head": "out"}
    assert suggested_renaming({"a": "ReLU", "b": "Linear"}, {"m.a": "ReLU", "m.b": "Linear"}, {}) == {".": "m"}
    assert suggested_renaming({"a": "ReLU"}, {"b": "Linear"}, {}) == {}


def test_suggestions_have_wildcards_for_repeated_blocks() -> None:
    parts = {"ln_1": "LayerNorm", "attn.c_proj": "Linear", "mlp.c_fc": "Linear", "mlp.act": "GELU"}
    names = {"ln_1": "norm1", "attn.c_proj": "attn.proj", "mlp.c_fc": "mlp.fc1", "mlp.act": "mlp.act"}
    one = {f"h.{block}.{part}": kind for block in range(12) for part, kind in parts.items()}
    other = {f"blocks.{block}.{names[part]}": kind for block in range(12) for part, kind in parts.items()}
    rename = suggested_renaming(one, other, {})
    assert set(renamed_layers(rename, [*one], [*other]).values()) == {*other}
    assert len(rename) == 4
