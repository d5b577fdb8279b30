"""Tasks without a loss for `mode: forward`: calls of the model, and language models that continue prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..probe.samples import TARGET_KEYS
from ..values.nested import number_of_samples, structure
from .base import Generated, Outcome
from .model_output import main_output


class ForwardOnly:
    """Call the model with the inputs of each batch, without a loss. For `mode: forward`.

    The model is called with the first element of a tuple or list, whose other elements are targets; with the entries of
    a mapping by keyword, except `target`, `targets`, `label`, `labels` and `y`; or with any other batch as it is.
    `forward.of` selects a part of the output for gradients.
    """

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Call the model.

        Returns:
            An outcome without a loss. The number of samples is the size of dimension 0 of the inputs, or the length of
            a list of inputs.
        """
        inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if isinstance(inputs, Mapping):
            inputs = {name: value for name, value in inputs.items() if name not in TARGET_KEYS}
            model(**inputs)
        else:
            model(inputs)
        return Outcome(None, len(inputs) if isinstance(inputs, list | tuple) else number_of_samples(inputs))


class Generate:
    """Continue prompts with a language model.

    A batch is a list of prompts: texts, or int64 tensors [T] of token ids. Models of Transformers generate with their
    own `generate`. Prompts of different lengths are padded on the left. Any other model maps tokens [N, T] to logits
    [N, T, vocabulary]. It gets no mask and keeps no cache, so its prompts must have the same length.

    The model runs once per new token. The first call processes the prompt. The column `call` of a hook at a module that
    the model calls once is therefore the index of the new token.

    Args:
        max_new_tokens: The number of new tokens. Models of Transformers stop earlier at their end-of-sequence token.
        tokenizer: Converts text to tokens and back with its methods `encode` and `decode`, as those of Transformers. Default: None, for
            prompts that are tokens.
        sample: Whether to draw tokens from the distribution of the model, with the global random state, which the seed of
            the run determines. Default: False, the most likely token.
        use_cache: Whether models of Transformers keep keys and values of earlier tokens. Each call after the first one
            then processes one token, otherwise all tokens so far. Default: True.
        options: Further arguments of `generate` of models of Transformers, such as `temperature`. Default: none.

    Raises:
        ValueError: `max_new_tokens` is less than 1.
    """

    def __init__(
        self,
        max_new_tokens: int = 20,
        tokenizer: Any = None,
        sample: bool = False,
        use_cache: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        self.max_new_tokens = max_new_tokens
        self.tokenizer = tokenizer
        self.sample = sample
        self.use_cache = use_cache
        self.options = dict(options or {})
        if refused := self.options.keys() & {"num_return_sequences", "return_dict_in_generate"}:
            raise ValueError(f"options: {', '.join(sorted(refused))} would change the number or form of the results")

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Generate tokens after each prompt of a batch.

        Returns:
            An outcome without a loss, with the generated tokens of each prompt.

        Raises:
            TypeError: The batch is not a list of prompts, or it contains texts and there is no tokenizer.
            ValueError: The model is in training mode, or prompts differ in length and the model takes no mask.
        """
        if model.training:
            raise ValueError("this task computes no loss, so it cannot train a model: set mode=forward")
        if not isinstance(batch, list | tuple) or not batch:
            raise TypeError(f"the batch must be a list of prompts, but is {structure(batch)}")
        prompts = [self._tokens(prompt, batch) for prompt in batch]
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with torch.no_grad():
            has_generate = callable(getattr(model, "generate", None)) and hasattr(model, "generation_config")
            continuations = (self._by_model if has_generate else self._token_by_token)(model, prompts, device)
        generated = tuple(
            Generated(
                prompt=given if isinstance(given, str) else self._text(tokens),
                text=self._text(new),
                prompt_tokens=tokens,
                tokens=new,
            )
            for given, tokens, new in zip(batch, prompts, continuations, strict=True)
        )
        return Outcome(None, len(prompts), generated=generated)

    def sample_targets(self, batch: Any) -> None:
        """Return None, because prompts have no targets."""

    def _tokens(self, prompt: Any, batch: Any) -> list[int]:
        if isinstance(prompt, Tensor) and prompt.dim() == 1 and prompt.numel() and not prompt.is_floating_point():
            return prompt.tolist()
        if not isinstance(prompt, str):
            raise TypeError(f"a prompt must be a text or int64 tokens [T], but the batch is {structure(batch)}")
        if self.tokenizer is None:
            raise TypeError("the prompts are texts, but the task has no tokenizer; set task.tokenizer")
        return [*self.tokenizer.encode(prompt)]

    def _text(self, tokens: Sequence[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(tokens)

    def _by_model(self, model: Any, prompts: Sequence[Sequence[int]], device: torch.device) -> list[list[int]]:
        ends = self.options.get("eos_token_id", model.generation_config.eos_token_id)
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        length, fill = max(map(len, prompts)), (ends or [0])[0]
        padded = [[fill] * (length - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        tokens = model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            **{
                "max_new_tokens": self.max_new_tokens,
                "do_sample": self.sample,
                "use_cache": self.use_cache,
                "pad_token_id": fill,
                **self.options,
            },
        )
        first = 1 if model.config.is_encoder_decoder else length  # A decoder starts with one token of its own.
        rows = tokens[:, first:].tolist()  # each up to the first end-of-sequence token, which is included
        return [row[: next((index for index, token in enumerate(row, 1) if token in ends), None)] for row in rows]

    def _token_by_token(
        self, model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> list[list[int]]:
        if len({len(prompt) for prompt in prompts}) > 1:
            lengths = ", ".join(str(len(prompt)) for prompt in prompts)
            raise ValueError(
                f"the prompts have {lengths} tokens, but this model takes no mask, so they must have the same length; "
                "or set a batch size of 1"
            )
        tokens = torch.tensor(prompts, device=device)
        for _ in range(self.max_new_tokens):
            logits = main_output(model(tokens))[:, -1]
            best = torch.multinomial(logits.softmax(-1), 1) if self.sample else logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, best], dim=1)
        return tokens[:, len(prompts[0]) :].tolist()
