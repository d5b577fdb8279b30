"""Training and `mode: forward` of small models with random weights: transformers, timm, torchvision and a graph network."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from state_comparison import identical
from tiers import tiered
from torch import Tensor, nn
from training_runs import run_in_memory

from instrument import ConfigError
from instrument.config.experiment import RunConfig
from instrument.config.parse import parse_config
from instrument.tasks import HuggingFace, Outcome
from instrument.tasks.base import batch_with_targets
from instrument.training.dry_run import dry_run
from instrument.training.experiment import Experiment
from instrument.training.loop import run_forward
from instrument.training.verification import verify

SAMPLES = 6
COMMON = """
optimizer: {_target_: torch.optim.SGD, lr: 0.01}
train: {steps: 2, batch_size: 3, eval_batch_size: 4}
hooks:
  seen: {layers: "**", kind: forward, action: record}
  tested: {layers: "**", kind: forward, action: record, phase: eval}
  gradients: {layers: "**", kind: parameter_grad, action: record}
"""
TASKS = {
    "forward": "task: {_target_: instrument.tasks.ForwardOnly}",
    "huggingface": "task: {_target_: instrument.tasks.HuggingFace}",
    "loss_dict": "task: {_target_: instrument.tasks.LossDict}",
    "graphs": f"task: {{_target_: {__name__}.ClassifyGraphs}}",
    "cross_entropy": "task: {_target_: instrument.tasks.Supervised, loss: {_target_: torch.nn.CrossEntropyLoss}}",
}


def items(split: str, kind: str) -> list[Any]:
    """Return random samples of a kind of data."""
    generator = torch.Generator().manual_seed(int(split == "train"))

    def tokens(length: int) -> Tensor:
        return torch.randint(2, 32, (length,), generator=generator)

    def pixels(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def sample(index: int) -> Any:
        label = index % 2
        text = tokens(8)
        mask = torch.ones(8, dtype=torch.int64)
        box = torch.tensor([[1.0, 2.0, 20.0, 25.0], [3.0, 3.0, 30.0, 30.0]][: 1 + label])
        match kind:
            case "text":
                return {"input_ids": text, "attention_mask": mask, "labels": text}
            case "masked":
                return {"input_ids": text, "labels": text.where(torch.arange(8) < 2 + index % 3, -100)}
            case "pair":
                return {"input_ids": text, "labels": tokens(5)}
            case "image":
                return {"pixel_values": pixels(3, 16, 16), "labels": label}
            case "sound":
                return {"input_features": pixels(8, 16), "labels": label}
            case "captioned":
                return {"pixel_values": pixels(3, 16, 16), "input_ids": text, "attention_mask": mask}
            case "classified":
                return pixels(3, 64, 64), label
            case "boxes":  # images of different sizes
                return pixels(3, 40 + 8 * label, 48), {"boxes": box, "labels": torch.ones(len(box), dtype=torch.int64)}
            case "segments":
                return pixels(3, 32, 32), torch.randint(3, (32, 32), generator=generator)
            case "geometric" | "graph":
                nodes = 3 + index % 3
                edges = torch.tensor([[i, (i + 1) % nodes] for i in range(nodes)]).T
                if kind == "graph":
                    return {"nodes": pixels(nodes, 4), "edges": edges, "label": label}
                from geometric import Data

                return Data(x=pixels(nodes, 4), edge_index=edges, y=torch.tensor([label]))
        raise ValueError(kind)

    return [sample(index) for index in range(SAMPLES)]


def with_return_loss(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Join samples, and add the argument with which CLIP computes a loss."""
    return {**torch.utils.data.default_collate(samples), "return_loss": True}


@dataclass
class Graphs:
    """A batch of graphs: nodes [V, F], edges [2, E], the graph of each node [V], labels [G]."""

    nodes: Tensor
    edges: Tensor
    graph: Tensor
    labels: Tensor


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Join graphs into one graph. Its tensors differ in dimension 0, and one is in a dataclass."""
    sizes = [len(sample["nodes"]) for sample in samples]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    labels = torch.tensor([sample["label"] for sample in samples])
    return {
        "graphs": Graphs(
            torch.cat([sample["nodes"] for sample in samples]),
            torch.cat([sample["edges"] + start for sample, start in zip(samples, starts, strict=True)], dim=1),
            torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes)),
            labels,
        ),
        "labels": labels,
    }


class ClassifyGraphs:
    """A task for batches of torch_geometric: the model classifies nodes, and their mean is that of the graph."""

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        from torch_geometric.nn import global_mean_pool

        logits = global_mean_pool(model(batch.x, batch.edge_index), batch.batch)
        return Outcome(
            nn.functional.cross_entropy(logits, batch.y), batch.num_graphs, (logits.argmax(1) == batch.y).sum()
        )


class Detector(nn.Module):
    """A model with the interface of torchvision's detection models: losses in training, else a dict for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        boxes = self.head(torch.stack([self.features(image).mean((1, 2)) for image in images]))
        if not self.training:
            return [{"boxes": box} for box in boxes]
        assert targets is not None
        off = [(box - target["boxes"]).abs().mean() for box, target in zip(boxes, targets, strict=True)]
        return {"boxes": torch.stack(off).mean(), "size": boxes.square().mean()}


class MessagePassing(nn.Module):
    """Two rounds of message passing, and a classification of each graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rounds = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.head = nn.Linear(4, width)

    def forward(self, graphs: Graphs, labels: Tensor) -> dict[str, Tensor]:
        nodes = graphs.nodes
        for layer in self.rounds:
            messages = torch.zeros_like(nodes).index_add(0, graphs.edges[1], nodes[graphs.edges[0]])
            nodes = layer(torch.cat([nodes, messages], dim=1)).relu()
        pooled = nodes.new_zeros(len(labels), 4).index_add(0, graphs.graph, nodes)
        return {"logits": self.head(pooled)}


TINY = "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32"
IMAGES = "image_size: 16, patch_size: 8"
DETECTION = "weights: null, weights_backbone: null, num_classes: 3"
FAMILIES = {
    "gpt2": ("text", "huggingface", "transformers.GPT2LMHeadModel, config: {_target_: transformers.GPT2Config, "
             "vocab_size: 32, n_positions: 16, n_embd: 16, n_layer: 2, n_head: 2, bos_token_id: 0, eos_token_id: 0}"),
    "llama": ("text", "huggingface", "transformers.LlamaForCausalLM, config: {_target_: transformers.LlamaConfig, "
              f"vocab_size: 32, {TINY}, num_key_value_heads: 1}}"),
    "bert": ("masked", "huggingface", "transformers.BertForMaskedLM, config: {_target_: transformers.BertConfig, "
             f"vocab_size: 32, {TINY}}}"),
    "t5": ("pair", "huggingface", "transformers.T5ForConditionalGeneration, config: {_target_: transformers.T5Config, "
           "vocab_size: 32, d_model: 16, d_kv: 8, d_ff: 32, num_layers: 2, num_heads: 2, decoder_start_token_id: 0}"),
    "vit": ("image", "huggingface", "transformers.ViTForImageClassification, config: {_target_: transformers.ViTConfig, "
            f"{IMAGES}, {TINY}, num_labels: 2}}"),
    "whisper": ("sound", "huggingface", "transformers.WhisperForAudioClassification, config: {"
                "_target_: transformers.WhisperConfig, d_model: 16, encoder_layers: 2, encoder_attention_heads: 2, "
                "encoder_ffn_dim: 32, num_mel_bins: 8, max_source_positions: 8, num_labels: 2, "
                "decoder_layers: 1, decoder_attention_heads: 2, decoder_ffn_dim: 32, vocab_size: 32, "
                "pad_token_id: 0, bos_token_id: 1, eos_token_id: 2, decoder_start_token_id: 1}"),
    "clip": ("captioned", "huggingface", "transformers.CLIPModel, config: {_target_: transformers.CLIPConfig, "
             f"text_config: {{{TINY}, vocab_size: 32, max_position_embeddings: 16, eos_token_id: 31}}, "
             f"vision_config: {{{TINY}, {IMAGES}}}, projection_dim: 8}}"),
    "mamba": ("text", "huggingface", "transformers.MambaForCausalLM, config: {_target_: transformers.MambaConfig, "
              "vocab_size: 32, hidden_size: 16, state_size: 4, num_hidden_layers: 2}"),
    "timm": ("classified", "cross_entropy", "timm.create_model, model_name: test_resnet, num_classes: 2"),
    "segmentation": ("segments", "cross_entropy", "torchvision.models.segmentation.lraspp_mobilenet_v3_large, "
                     "weights: null, weights_backbone: null, num_classes: 3"),
    "fcn": ("segments", "cross_entropy", "torchvision.models.segmentation.fcn_resnet50, "
            "weights: null, weights_backbone: null, num_classes: 3, aux_loss: true"),
    "ssd": ("boxes", "loss_dict", f"torchvision.models.detection.ssdlite320_mobilenet_v3_large, {DETECTION}"),
    "faster_rcnn": ("boxes", "loss_dict", "torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn, "
                    f"{DETECTION}, min_size: 64, max_size: 64"),
    "detector": ("boxes", "loss_dict", f"{__name__}.Detector"),
    "retinanet": ("boxes", "loss_dict", "torchvision.models.detection.retinanet_resnet50_fpn, "
                  f"{DETECTION}, min_size: 64, max_size: 64"),
    "geometric": ("geometric", "graphs", "torch_geometric.nn.GCN, in_channels: 4, hidden_channels: 8, num_layers: 2, "
                  "out_channels: 2"),
    "graph": ("graph", "huggingface", f"{__name__}.MessagePassing, width: 2"),
}  # fmt: skip
COLLATE = {
    "captioned": f"{__name__}.with_return_loss",
    "boxes": "instrument.training.loader.lists",
    "geometric": "torch_geometric.data.Batch.from_data_list",
    "graph": f"{__name__}.joined",
}
QUICK = ("gpt2", "t5", "vit", "clip", "detector", "graph")


def config_of(name: str, kind: str = "", **overrides: Any) -> RunConfig:
    default, task, model = FAMILIES[name]
    kind = kind or default
    collate = f"collate_fn: {{_target_: {COLLATE[kind]}}}" if kind in COLLATE else ""
    text = f"""
{COMMON}
{TASKS[task]}
model: {{_target_: {model}}}
data:
  dataset: {{_target_: {__name__}.items, kind: {kind}}}
  {collate}
"""
    return parse_config({**yaml.safe_load(text), **overrides})


@pytest.mark.slow
def test_dataset_of_hugging_face_is_built_from_yaml() -> None:
    rows = {
        "input_ids": [[2 + i] * 8 for i in range(SAMPLES)],
        "labels": [[-100] * 4 + [3 + i] * 4 for i in range(SAMPLES)],
    }
    config = config_of("bert").model_dump(by_alias=True, exclude_unset=True)
    config["data"] = {
        "dataset": {"_target_": "datasets.Dataset.from_dict", "mapping": rows},
        "collate_fn": {"_target_": "transformers.default_data_collator"},
        "slice": {"start": 1},
    }
    experiment = Experiment(parse_config(config))
    sink, _ = run_in_memory(experiment)
    assert list(sink.frame("metrics").phase) == ["train", "train", "eval"]
    (batch, *_) = experiment.eval_loader
    assert batch.batch["input_ids"].tolist() == rows["input_ids"][:4]
    assert batch.indices == [0, 1, 2, 3]


def test_targets_of_a_task_with_named_labels_are_found() -> None:
    experiment = experiment_of("vit")
    experiment.task.labels = "classes"  # type: ignore[attr-defined]
    classes = torch.tensor([1, 0])
    batch = {"classes": classes, "label": classes + 1}
    assert batch_with_targets(experiment.task, batch) == {"target": classes}


def experiment_of(name: str, kind: str = "", **overrides: Any) -> Experiment:
    torch.manual_seed(0)
    return Experiment(config_of(name, kind, **overrides))


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(vars(module)[key]) for module in model.modules() for key in vars(module) if key.endswith("_hooks"))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(FAMILIES, QUICK))
def test_model_family_trains_from_yaml(name: str) -> None:
    experiment = experiment_of(name)
    hooks_before = number_of_hooks(experiment.model)  # Mamba has hooks of its own.
    sink, _ = run_in_memory(experiment)
    metrics = sink.frame("metrics")
    assert list(metrics.phase) == ["train", "train", "eval"]
    assert [batch.samples for batch in experiment.eval_loader] == [4, 2]
    has_loss = metrics.loss.notna()
    assert has_loss.all() if FAMILIES[name][1] != "loss_dict" else list(has_loss) == [True, True, False]
    has_accuracy = (FAMILIES[name][1] == "huggingface" and name != "clip") or name in ("timm", "geometric")
    assert metrics.accuracy.notna().all() == has_accuracy
    stats = sink.frame("stats")
    for phase, hook in (("train", "seen"), ("eval", "tested")):
        called = {
            layer.name
            for layer in experiment.plan.layers
            if (calls := experiment.inferred_by_phase[phase].get(id(layer.module))) and any(calls.outputs)
        }
        assert len(called) > 3
        assert set(stats[stats.hook == hook].layer) == called
    assert len(stats[stats.hook == "gradients"]) > 3
    assert number_of_hooks(experiment.model) == hooks_before


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(["gpt2", "graph", "vit", "ssd"], quick=["graph"]))
def test_recording_changes_nothing(name: str) -> None:
    certificate = verify(config_of(name, train={"steps": 2, "batch_size": 3, "accumulate": 2, "eval_batch_size": 4}))
    assert certificate.holds, certificate
    assert certificate.rows > 0


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("name", "layer", "task"),
    [
        ("gpt2", "lm_head", "huggingface"),
        ("gpt2", "lm_head", "forward"),
        ("detector", "head", "loss_dict"),
        ("detector", "head", "forward"),
        pytest.param("faster_rcnn", "rpn.head.cls_logits", "loss_dict", marks=pytest.mark.slow),
        pytest.param("faster_rcnn", "rpn.head.cls_logits", "forward", marks=pytest.mark.slow),
    ],
)
def test_model_family_runs_in_mode_forward(name: str, layer: str, task: str) -> None:
    hooks = {"seen": {"layers": layer, "kind": "forward", "action": "record", "stats": "none", "tensors": True}}
    experiment = experiment_of(name, mode="forward", hooks=hooks, task=yaml.safe_load(TASKS[task])["task"])
    before = copy.deepcopy(experiment.model.state_dict())
    sink, means = run_in_memory(experiment, loop=run_forward)
    assert (means["loss"] is None) == (task != "huggingface")
    found = [row["values"] for row in sink.records("tensors")]

    seen: list[Tensor] = []
    experiment.model.eval().get_submodule(layer).register_forward_hook(lambda _, __, output: seen.append(output))
    data = items("train", FAMILIES[name][0])
    with torch.no_grad():
        for start in (0, 3):
            batch = [data[index] for index in range(start, start + 3)]
            if name == "gpt2":
                experiment.model(torch.stack([sample["input_ids"] for sample in batch]))
            else:
                experiment.model([image for image, _ in batch])
    assert [tensor.numpy().tobytes() for tensor in found] == [tensor.numpy().tobytes() for tensor in seen]
    assert identical(before, experiment.model.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("few_repeats")
@pytest.mark.parametrize("name", tiered(["llama", "graph"], quick=["graph"]))
def test_dry_run_accepts_the_batches(name: str) -> None:
    forecast = dry_run(experiment_of(name))
    assert forecast.cost["seen"].rows > 0
    assert forecast.cost["tested"].rows > 0


def own_change(tensor: Tensor, context: Any) -> Tensor:
    return tensor * 0.5


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "layer"), [("llama", "model.layers.0.mlp"), ("graph", "rounds.1")])
def test_functions_are_called_in_keyword_models(name: str, layer: str) -> None:
    fn = {"_target_": f"{__name__}.own_change"}
    hooks = {"half": {"layers": layer, "kind": "forward", "action": "modify", "fn": fn}}
    experiment = experiment_of(name, hooks=hooks)
    sink, _ = run_in_memory(experiment)
    assert len(sink.frame("effects")) == 2


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "kind"), [("llama", "masked"), ("graph", "graph")])
def test_counted_labels_are_weighted_equally(name: str, kind: str) -> None:
    """The gradient of three micro-batches with different numbers of labels is that of one batch."""
    results = []
    for batch_size, accumulate in ((SAMPLES, 1), (2, 3)):
        options = {"steps": 1, "batch_size": batch_size, "accumulate": accumulate}
        experiment = experiment_of(name, kind, train=options, hooks={})
        sink, _ = run_in_memory(experiment)
        results.append((sink.frame("metrics"), [p.detach() for p in experiment.model.parameters()]))
    (single, expected), (several, found) = results
    for metric in ("loss", "accuracy"):
        assert several[metric].tolist() == pytest.approx(single[metric].tolist(), rel=1e-5)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("kind", "overrides", "messages"),
    [
        ("classified", {}, ["the batch is [float32 [3, 3, 64, 64], int64 [3]], but this task", "HuggingFace, batch"]),
        ("image", {}, ["layer 'model'", "You must specify exactly one of input_ids", "'labels': int64 [3]"]),
        ("text", {"task": {"_target_": f"{__name__}.NotATask"}}, ["must return instrument.tasks.Outcome", "NotATask, batch"]),
        ("text", {"task": {"_target_": "instrument.tasks.LossDict"}}, ["must return a dict of scalar losses"]),
    ],
)  # fmt: skip
def test_unsuitable_batch_is_reported_before_the_run(kind: str, overrides: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment_of("llama", kind, **overrides)
    assert all(message in str(caught.value) for message in messages), str(caught.value)


class NotATask:
    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss


class FailsLater:
    """A task that fails in the fourth call: two of shape inference, one step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise ValueError("the task failed")
        return HuggingFace()(model, batch)


def test_error_of_a_task_in_a_step_names_task_and_batch() -> None:
    experiment = experiment_of("llama", task={"_target_": f"{__name__}.FailsLater"})
    with pytest.raises(ValueError, match="the task failed") as caught:
        run_in_memory(experiment)
    (note,) = caught.value.__notes__
    assert note == (
        f"task {__name__}.FailsLater, batch {{'input_ids': int64 [3, 8], 'attention_mask': int64 [3, 8], "
        "'labels': int64 [3, 8]}"
    )
