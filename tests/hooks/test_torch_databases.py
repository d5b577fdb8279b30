"""PyTorch's own databases of operators and modules, with which PyTorch tests itself.

Recording changes no result of an operator, and the recorded gradients of a module's arguments are those of PyTorch's hook.
All tests are slow: each imports its database, which takes 4 seconds.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hook_runs import Calls, keep, tensors_by
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map

import instrument

pytestmark = pytest.mark.slow

PARTS = [pytest.param(slice(start, None, 12), id=f"part {start}") for start in range(12)]  # of a database
FUNCTION_HOOKS = {
    kind: {"layers": ".", "kind": kind, "functions": "*", "action": "record"} for kind in ("function", "function_grad")
}
PROPERTIES = ("H", "T", "mH", "mT")  # reads of which are not seen
INPUT_GRADIENTS = keep("full_backward")


@pytest.fixture(autouse=True)
def fast_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the databases find no `unittest.TestCase` at once: they look for it in the stack, which takes 0.1 s per operator."""
    monkeypatch.setattr(inspect, "stack", list)


def tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def replaced(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with other tensors. A tensor that occurs several times is replaced by one tensor."""
    made = {id(tensor): make(tensor) for tensor in tensors_of(value)}
    return tree_map(lambda leaf: made.get(id(leaf), leaf), value)


def new_leaves(value: Any) -> Any:
    """Return the value with copies of its tensors, which require gradients as those do."""
    return replaced(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def clones(value: Any) -> Any:
    """Return the value with clones of its tensors, through which gradients flow to them."""
    return replaced(value, Tensor.clone)


def train(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
    """Run a forward and a backward pass. Return the output and the random state."""
    torch.manual_seed(0)
    output = model(*args, **kwargs)
    roots = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [root.detach().clone() for root in roots])
    return output, torch.get_rng_state()


def assert_same(values: Any, expected: Any, subject: object) -> None:
    for value, right in zip(tree_leaves(values), tree_leaves(expected), strict=True):
        if isinstance(right, Tensor):
            torch.testing.assert_close(
                value, right, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{subject}: {text}"
            )
        else:
            assert repr(value) == repr(right), subject


def results(model: nn.Module, args: Any, kwargs: Any, *, in_place: bool) -> tuple[Any, ...]:
    """Return the outputs, the arguments afterwards, their gradients and the random state of a call with new leaves."""
    args, kwargs = new_leaves((args, kwargs))
    given = (clones(args[0]), *args[1:]) if in_place else args
    output, state = train(model, given, kwargs)
    return output, given, [leaf.grad for leaf in tensors_of((args, kwargs))], state


def forms(entry: Any) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Yield the function, method and operator of an entry, and whether it changes its first argument."""
    in_place = (entry.inplace_variant, entry.inplace_operator_variant)
    for form in (entry.op, entry.method_variant, entry.operator_variant, *in_place):
        if form is not None:
            yield form, form in in_place


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_recorded_functions_change_no_operator(part: slice) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    for entry in op_db[part]:
        # An empty tensor has the values of uninitialized memory. Other operators need a GPU.
        if "empty" in entry.name or "jiterator" in entry.name or not entry.dtypes:
            continue
        dtype = torch.float32 if torch.float32 in entry.dtypes else min(entry.dtypes, key=str)
        needs_gradient = entry.supports_autograd and dtype.is_floating_point
        samples = itertools.islice(entry.sample_inputs("cpu", dtype, requires_grad=needs_gradient), 1)
        checked = 0
        for sample, (form, in_place) in itertools.product(samples, forms(entry)):
            model, call = Calls(form), ((sample.input, *sample.args), sample.kwargs)
            subject = (entry.full_name, form, sample)
            try:
                expected = results(model, *call, in_place=in_place)
            except (RuntimeError, TypeError):  # such as a result that does not fit into the first argument
                continue
            with instrument.attach(model, FUNCTION_HOOKS, rules=None) as probe:
                values = results(model, *call, in_place=in_place)
                probe.end_step()
            assert_same(values, expected, subject)
            if any(tensor.numel() for tensor in tensors_of(expected[0])):
                rows, coverage = probe.sink.records("stats"), probe.coverage()
                assert any(row["kind"] == "function" for row in rows) or entry.name in PROPERTIES, subject
                assert rows or all(row["cause"] for row in coverage), subject
            checked += 1
        assert checked, entry.full_name


def argument_gradients(args: Any, kwargs: Any) -> dict[str, Tensor]:
    """Return the gradients of leaves by the path of the argument."""
    leaves = [*tree_leaves_with_path(args), *tree_leaves_with_path(kwargs)]
    return {
        ".".join(str(getattr(key, "idx", getattr(key, "key", None))) for key in path): leaf.grad
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.grad is not None
    }


def repeated(args: Any) -> Any:
    """Return the arguments with one tensor in place of all that have its shape."""
    first: dict[Any, Tensor] = {}
    return tuple(
        first.setdefault((arg.shape, arg.dtype), arg) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in args
    )


def compare_with_pytorch_hook(module: nn.Module, args: Any, kwargs: Any, subject: object) -> None:
    """Compare the recorded gradients of arguments with those of PyTorch's hook, and all results with those without hooks.

    PyTorch's hook has the gradients of positional tensors: zeros for a tensor without a gradient. It fails in a module that
    changes its argument in place. Other arguments are compared with the gradients of their leaves.
    """
    reference, recorded = copy.deepcopy(module), copy.deepcopy(module)
    call, reference_call, recorded_call = (new_leaves((args, kwargs)) for _ in range(3))
    expected = train(module, *clones(call))
    wanted = argument_gradients(*call)

    def keep(module: nn.Module, grad_input: tuple[Tensor | None, ...], grad_output: Any) -> None:
        wanted.update({str(place): part for place, part in enumerate(grad_input) if part is not None})

    reference.register_full_backward_hook(keep)
    in_place = getattr(module, "inplace", False)
    with pytest.raises(RuntimeError, match="modified inplace") if in_place else nullcontext():
        train(reference, *clones(reference_call))
    with instrument.attach(recorded, {"gradients": INPUT_GRADIENTS}, rules=None) as probe:
        values = train(recorded, *clones(recorded_call))
        probe.end_step()
    assert_same(values, expected, subject)
    for one, other in ((recorded_call, call), (tuple(recorded.parameters()), tuple(module.parameters()))):
        assert_same([leaf.grad for leaf in tensors_of(one)], [leaf.grad for leaf in tensors_of(other)], subject)
    rows = tensors_by(probe, "path")
    assert rows.keys() <= wanted.keys(), subject
    assert not any(wanted[path].any() for path in wanted.keys() - rows.keys()), subject
    assert_same(rows, {path: wanted[path] for path in rows}, subject)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS)
def test_gradients_of_arguments_equal_pytorch_module_hook(part: slice) -> None:
    from torch.testing._internal.common_modules import module_db

    for entry in module_db[part]:
        dtype = torch.float64 if torch.float64 in entry.dtypes else entry.dtypes[0]
        for training in (True, False)[: 1 + entry.train_and_eval_differ]:
            samples = entry.module_inputs_func(entry, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for sample in samples:
                made, given = sample.constructor_input, sample.forward_input
                module = entry.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
                subject = (entry.name, sample.desc, training)
                compare_with_pytorch_hook(copy.deepcopy(module), given.args, given.kwargs, subject)
                if hasattr(module, "inplace"):
                    module.inplace = True
                    compare_with_pytorch_hook(module, given.args, given.kwargs, (*subject, "in place"))
                again = repeated(given.args)
                # SoftMarginLoss is not differentiable in its target.
                if any(map(operator.is_not, again, given.args)) and entry.name != "nn.SoftMarginLoss":
                    compare_with_pytorch_hook(module, again, given.kwargs, (*subject, "repeated"))
