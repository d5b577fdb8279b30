"""The default rules on new models of transformers: which warn in the first steps of a model with its usual initial weights.

    python benchmarks/libraries.py [--only NAME] [--steps 3]

Each model with a language or an image task is created with two layers and 64 features, and trained on random samples. Architectures with
a constraint that these sizes violate are left out, and counted. Language models get the tokens as their labels, as most of them shift
these themselves.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

import instrument
from instrument.config.rules import default_rules

TASKS = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "image": transformers.AutoModelForImageClassification,
}
HOOK_SETS = ["inputs", "activations", "gradients", "parameters"]
TOKENS, CLASSES, LAYERS, HEADS, PARAMETERS, SECONDS = 200, 10, 2, 4, 2e7, 30
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("d_kv", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_key_value_heads": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2},
    **{"vocab_size": TOKENS, "patch_size": 8, "num_labels": CLASSES},
}  # fmt: skip


def make(name: str, task: str) -> PreTrainedModel | None:
    """Create a small model; None if the architecture does not have the task, consists of others, or stays large."""
    config = CONFIG_MAPPING[name]
    if config not in TASKS[task]._model_mapping or config.sub_configs:
        return None
    usual = config()
    sizes: dict[str, Any] = {key: size for key, size in SIZES.items() if hasattr(usual, key)}
    if kinds := vars(usual).get("layer_types"):
        sizes["layer_types"] = list(kinds)[:LAYERS]
    torch.manual_seed(0)
    model: PreTrainedModel = TASKS[task].from_config(config(**sizes))
    return model if sum(parameter.numel() for parameter in model.parameters()) <= PARAMETERS else None


def batch_of(task: str) -> dict[str, Tensor]:
    if task == "image":
        return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(CLASSES, (4,))}
    tokens = torch.randint(3, TOKENS, (4, 24))
    return {"input_ids": tokens, "labels": torch.randint(3, TOKENS, (4, 24)) if task == "seq2seq" else tokens}


def train(model: PreTrainedModel, task: str, steps: int) -> list[tuple[str, str]]:
    """Train a model. Return the rules that warned, with their messages."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        with instrument.attach(model, HOOK_SETS, optimizer=optimizer, out=Path(folder) / "run") as probe:
            for _ in range(steps):
                optimizer.zero_grad()
                loss = model(**batch_of(task)).loss
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
        events = instrument.load(Path(folder) / "run").events
    found = events[events["rule"].isin(default_rules()) & (events["severity"] == "warning")]
    return list(zip(found["rule"], found["message"], strict=True))


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only architectures whose name contains this text")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    trained, left_out, models = 0, 0, Counter[str]()
    for name in sorted(name for name in CONFIG_MAPPING if arguments.only in name):
        for task in TASKS:
            try:
                with limit(SECONDS):
                    model = make(name, task)
                    warned = [] if model is None else train(model, task, arguments.steps)
            except Exception as error:  # sizes that the architecture does not have
                print(
                    f"{name} ({task}) left out: {type(error).__name__}: {' '.join(str(error).split())[:120]}",
                    flush=True,
                )
                left_out += 1
                continue
            trained += model is not None
            models.update({rule for rule, _ in warned})
            for rule, message in warned:
                print(f"{name} ({task}) {rule}: {message}", flush=True)
    print(
        f"\n{trained} models trained, {left_out} left out. Models with a warning, by rule: {dict(models.most_common())}"
    )


if __name__ == "__main__":
    main()
