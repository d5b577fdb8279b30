"""Rules of relations. `instrument/relations/` checks the relation with the name of the rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..config.rules import RuleBase
from ..tables.kinds import KINDS
from .rule import RELATIONS, Bounds, CatalogueRule, Firing
from .step_rows import Location, StepRows


class RelationRule(CatalogueRule[RuleBase]):
    """A rule that fires where a relation does not hold. It has the name of the relation, and no fields of its own."""

    stage = "setup"
    requires = "its own observations of the training, without hooks"

    def __init_subclass__(cls, name: str, **options: Any) -> None:
        cls.relation = name
        super().__init_subclass__(name, **options)

    def update(self, rows: StepRows) -> Iterator[Firing]:
        for row in rows.relations:
            if row.relation == self.relation and row.holds is False:
                yield Firing(row.text, 1.0 if row.value is None else row.value, layer=row.layer or None)

    def bounds(self) -> list[Bounds] | None:
        return [Bounds(RELATIONS, high=0)]


class AccumulationDivides(RelationRule, name="accumulation_divides"):
    """The gradients of several micro-batches are added, but each loss is a mean that is not divided by their number.

    The step is then too large by this factor. Cross-entropies with `reduction="mean"` are checked, in one process,
    if the loop reports its micro-batches with `end_micro_step`. The tutorial of Accelerate on gradient accumulation divides the loss
    for this reason.
    """

    what = "accumulated gradients are not divided"
    advice = "Divide the loss of each micro-batch by their number before backward()."


class DistinctData(RelationRule, name="distinct_data"):
    """Two processes of `DistributedDataParallel` get the same batch in 3 checked steps, or all workers of a loader give the same ones.

    Processes get different data with a `DistributedSampler`. Workers give equal batches if each draws from a copy of one generator
    (https://docs.pytorch.org/docs/stable/notes/faq.html#my-data-loader-workers-return-identical-random-numbers), or if each reads all
    data of an iterable dataset. Batches are compared by hashes of up to 65,536 elements of each tensor.
    """

    what = "processes get the same data"
    advice = "Use a DistributedSampler, and seed each worker by torch.utils.data.get_worker_info()."


class DoubleSoftmax(RelationRule, name="double_softmax"):
    """A loss that applies a softmax or a sigmoid gets the output of another one: a Softmax followed by CrossEntropyLoss, for example.

    `torch.nn.functional.cross_entropy` and `binary_cross_entropy_with_logits` expect logits. With K classes, the loss of
    probabilities is at least log(1 + (K - 1) / e), so that it cannot become small. Views, casts and clamps between both are ignored.
    """

    what = "softmax applied twice"
    advice = "Remove this layer or call, and pass its input to the loss function, which expects logits."


class DropoutKeepsUnits(RelationRule, name="dropout_keeps_units"):
    """A dropout module of PyTorch in training mode drops more than 0.9 of its input.

    Usual probabilities are 0.2 to 0.5, and at most 0.8 (Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html). The
    scaling of the units that are kept by 1 / (1 - p) adds noise with p / (1 - p) times their mean square: more than 9 times.
    """

    what = "dropout of nearly all units"
    advice = "Use a smaller probability: p of a dropout module is the fraction that it drops."


class GradientsZeroed(RelationRule, name="gradients_zeroed"):
    """A gradient is added to that of the previous step, because no code zeroes it.

    A few parameters of each optimizer are observed. Gradients of micro-batches are added within a step. The check is that of TrainCheck
    (Jiang et al., OSDI 2025) for a missing `zero_grad`.
    """

    what = "gradients are not zeroed"
    advice = "Call optimizer.zero_grad() once in each step, before the first backward pass."


class LabelsShifted(RelationRule, name="labels_shifted"):
    """A model that uses only earlier tokens is trained on the token that it sees, on the token after the next one, or on the previous one.

    The targets of cross-entropy are compared with the integer inputs of the model, [samples, positions]. Whether the model uses only
    earlier tokens is tested: it is called again with one other token. Masked language models, autoencoders, and models with any output
    for the next token are not reported. A masked language model whose loss counts visible tokens is reported. The models of
    transformers shift labels themselves; labels that the loop has shifted are then shifted twice
    (https://huggingface.co/docs/transformers/model_doc/gpt2, `labels`). Targets that are the next tokens of other samples of the batch
    are reported too: inputs and labels have different orders.
    """

    what = "labels are not the next tokens"
    advice = "Keep inputs and labels in the same order, and shift the labels once: in the loop, or in a model that shifts them."


class LooksAhead(RelationRule, name="looks_ahead"):
    """The outputs of a model that is trained on the next token depend on later tokens, which it has to predict.

    The usual cause is attention without a causal mask (Vaswani et al., 2017, section 3.2.3). After the first step, a copy of the model is
    called again in evaluation mode, with one token of the first batch changed; an output at an earlier position may not change by more
    than 1e-4 of the largest output (1e-2 in half precision). Models with an encoder and a decoder are not checked.
    """

    what = "model of the next token uses later tokens"
    advice = "Pass a causal mask to the attention, or is_causal=True, and check layers that mix positions."


class LossBroadcasts(RelationRule, name="loss_broadcasts"):
    """`mse_loss`, `l1_loss`, `smooth_l1_loss` or `huber_loss` gets predictions [samples, 1] and targets [samples], or vice versa.

    The loss is then the mean over all pairs of a prediction and a target, whose minimum is the same prediction for all samples: the
    mean of the targets (for `mse_loss`). PyTorch warns of the shapes (torch.nn.functional.mse_loss), and not of other broadcasts.
    """

    what = "predictions are compared with other targets"
    advice = "Give the output and the targets the same shape, such as output.squeeze(1)."


class ModeOfPhase(RelationRule, name="mode_of_phase"):
    """A training step runs in evaluation mode, an evaluation in training mode, or an evaluation is recorded as training.

    In training steps of a model with dropout or batch normalization, the complete model is in evaluation mode: since an evaluation, or
    from the start with dropout in a part that is trained. Frozen batch normalization in a model in training mode is correct, and so is
    dropout in a model that evaluates.

    In your own loop, a call outside of `with probe.evaluating()` is recorded as training. It is reported if it is in evaluation mode
    without gradients, and if the step before has no such call: some trainings compute their targets with one in each step.
    TrainCheck (Jiang et al., OSDI 2025) learns such relations.
    """

    what = "the mode of the model does not match the phase"
    advice = (
        "Call model.train() before the training steps, also after each evaluation, and model.eval() before an evaluation. "
        'In your own loop, evaluate inside `with probe.evaluating():`, and collect data inside `with probe.in_phase("rollout"):`.'
    )


class NarrowLayer(RelationRule, name="narrow_layer"):
    """The logits of at least three classes lie on a line, in a model with a Linear layer of one unit.

    All information passes through this unit: each class is a range of one number. A layer with as many units as there are classes less one
    does not limit the logits. Layers of one unit next to others, such as those of attention and gates, are not reported.
    """

    what = "layer of one unit before several classes"
    advice = "Use more units in this layer: at least as many as there are classes."


class PaddingAttended(RelationRule, name="padding_attended"):
    """The `attention_mask` of a model does not mask padding, or a `*padding_mask` is true for the tokens instead of the padding.

    Padding is `config.pad_token_id` at the ends of samples and nowhere else, and in the second case a token that is repeated there. The
    outputs then depend on how long the padding is (Vaswani et al. 2017, section 3.2.3, for masks). With a mask or without one, a model
    whose outputs are the same, such as a causal model of texts that are padded at the end, is not reported.
    """

    what = "padding is attended to"
    advice = (
        "Pass attention_mask of the tokenizer: 1 for tokens and 0 for padding. A key_padding_mask is true for padding."
    )


class PaddingInLoss(RelationRule, name="padding_in_loss"):
    """Cross-entropy counts targets at padded positions of the input, so that the model learns to predict padding.

    Padding is where the argument `attention_mask` of the model is 0, or where its input is `config.pad_token_id`, or a token that most
    samples end with, in runs of different lengths, and a fifth of all. It is expected at the end or the start of a sample, or of targets of
    `ctc_loss`. Losses with `reduction="none"` or with class weights are not checked, since they may leave these targets out otherwise.
    """

    what = "padding counts in the loss"
    advice = "Set the labels at padded positions to -100, or pass ignore_index= to the loss."


class ParametersFollowGradients(RelationRule, name="parameters_follow_gradients"):
    """Optimizers do not change parameters that have a gradient, or change frozen ones.

    Reported are: an optimizer that changes none of its parameters in 4 checked steps, although gradients and learning rates are not
    zero; a parameter with a gradient that no optimizer holds, because it replaced another one or because it was left out; and a frozen
    parameter that an optimizer still changes. Parameters that are left out before all others, or that are the majority, are not
    reported: such a choice is usual in fine-tuning. TrainCheck (Jiang et al., OSDI 2025) learns these relations.
    """

    what = "parameters do not follow their gradients"
    advice = (
        "Create the optimizer after the model has its final parameters, and pass all trainable parameters to it; "
        "set the gradient of a parameter that becomes frozen to None."
    )


class PositionsDiffer(RelationRule, name="positions_differ"):
    """The argument `position_ids` of the model has one value for all tokens of all samples.

    Attention without positions does not use the order of tokens (Vaswani et al. 2017, section 3.5). Fewer than 4 tokens are not checked.
    """

    what = "tokens with the same position"
    advice = "Do not pass position_ids, or count them from 0 in each sample."


class RateInEffect(RelationRule, name="rate_in_effect"):
    """A learning rate is negative or not finite, a warm-up never ends, or a scheduler changes the rate of an optimizer without steps.

    A training of at least 100 steps ends in the warm-up if its rate rises until the end and was at most 1% of the configured one: the
    warm-up takes more than 10,000 steps, which are many (Devlin et al. 2019). Its schedule may count epochs or samples. A scheduler
    without effect was created for an earlier optimizer of the same parameters, so the rate in effect is not the one that it reports.
    A scheduler whose length is that of the training in steps, but which is stepped less than a twentieth as often, is stepped once per
    epoch although its length counts batches.
    """

    what = "learning rate not in effect"
    advice = "Check the length of the warm-up. Create the scheduler for the optimizer that makes the steps, and again if it is replaced."


class ReplicasDiffer(RelationRule, name="replicas_differ"):
    """A fingerprint of a parameter, its update, gradient or optimizer state differs between data-parallel processes.

    It reads what hooks of the kinds `step_pre`, `step_post` and `parameter_grad` record with `stats: [fingerprint]`, and names the
    first step, the tensor and the ranks. Data-parallel processes apply equal gradients to equal parameters (Li et al., VLDB 2020), so
    that any difference is a fault of the program, the network or the hardware. Without a wrapper, the fingerprints have to be equal after
    two earlier steps, and to have changed in between.
    """

    requires = "fingerprints of parameters, updates or gradients, such as hooks=fingerprints"
    what = "tensors of processes differ"
    statistics = ("fingerprint",)
    advice = "Compare the gradients of the named step before and after they are averaged, and test the memory and links of the rank."

    def selects(self, location: Location) -> bool:
        return KINDS[location.kind].frequency == "step"


class ReplicasEqual(RelationRule, name="replicas_equal"):
    """The trained parameters of the processes of a data-parallel training are not equal in all bits after a step.

    All processes start with the same parameters and apply the same mean gradients (Li et al., VLDB 2020), so that any difference is a
    fault: a process calls `model.module`, changes its gradients or parameters, or has another optimizer. TrainCheck (Jiang et al., OSDI
    2025) finds the divergence of DeepSpeed issue 1801 by this relation. A training is data-parallel if it has a
    `DistributedDataParallel`, also one that the loop does not call, or if the gradients of all processes were equal once, although their
    inputs were not. Processes that shard parameters or average them later are not checked.
    """

    what = "parameters of processes differ"
    advice = "Call the wrapped model in the forward pass, and change gradients and parameters in all processes alike."


class SamplesVary(RelationRule, name="samples_vary"):
    """All samples of a batch are equal in 3 steps, or the model gets the same batch in 4 steps although the data loader has several.

    It also fires if a PyTorch data loader without shuffling gives batches with targets of a single class, and batches have different
    classes: the data are sorted by class. This check takes at least 5 batches of 8 samples. Batches have to be random samples of the data
    (Bengio 2012, https://arxiv.org/abs/1206.5533). Batches that the loop or a sampler makes, such as those of one patient, do not count.

    Equal samples and equal batches are checked if a PyTorch data loader with several batches is read in each of these steps. Full-batch
    training, a constant input that is no batch of a loader, and one batch that the loop keeps on purpose are not reported.
    """

    what = "samples do not vary"
    advice = "Pass the current batch to the model, call iter(loader) once per epoch, use the index in the dataset, and shuffle the data."


class TiedWeights(RelationRule, name="tied_weights"):
    """Parameters that were one parameter at the start, such as the embeddings of input and output, have different values.

    The embeddings of a model of transformers whose configuration declares `tie_word_embeddings` are checked too (Press and Wolf, 2017).
    TrainCheck (Jiang et al., OSDI 2025) finds such faults by the same relation.
    """

    what = "tied weights differ"
    advice = (
        "Tie the weights again after loading, copying or replacing a parameter, and before the optimizer is created."
    )


class WrongRangeOfLoss(RelationRule, name="wrong_range_of_loss"):
    """The output of the model cannot reach the minimum of the loss, because of its last activation function or a missing one.

    Reported are: `binary_cross_entropy` of a clamped Tanh, ReLU or Softplus, which is not a probability; cross-entropy, or binary
    cross-entropy with logits, of a Tanh or ReLU, whose probabilities cannot all become small; `nll_loss` of numbers that are not
    logarithms of probabilities; and `mse_loss`, `l1_loss`, `smooth_l1_loss` or `huber_loss` with more than 5% of the targets outside of
    the range of the output. The last activation function follows from the loss (Goodfellow et al. 2016, Deep Learning, section 6.2.2).

    Reported are also targets that the documentation excludes: several of 1 in a sample of a softmax for `binary_cross_entropy`, the blank
    of `ctc_loss`, and 0 instead of -1 for `cosine_embedding_loss`, `hinge_embedding_loss` or `soft_margin_loss`; and `kl_div` or `ctc_loss`
    of probabilities or of the output of a layer, instead of logarithms of probabilities.
    """

    what = "range of the output does not fit the loss"
    advice = "Use the activation function that the loss expects: none for logits and numbers, log_softmax for nll_loss."
