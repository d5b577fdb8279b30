"""Layers with other names in another run: mappings."""

from __future__ import annotations

import pytest

from instrument.comparison.alignment import renamed_layers
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
