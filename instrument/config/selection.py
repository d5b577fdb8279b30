"""The indices that the fields `units`, `heads`, `positions`, `samples` and `slice` of a spec select in a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from ..fields.field_types import Heads
from .base import HookBase, parse_slice


class SelectionError(ValueError):
    """A field selects elements that a tensor does not have. `allowed`: what the field may be for this tensor."""

    def __init__(self, field: str, message: str, allowed: str) -> None:
        super().__init__(message)
        self.field, self.allowed = field, allowed


def selected_indices(spec: HookBase, shape: Sequence[int], unit_dim: int | None) -> dict[int, tuple[int, ...]]:
    """Return what a spec without `slice` selects: the indices along each dimension in which not all are selected.

    `unit_dim` is the default dimension of the units; None without units. Raise a SelectionError if the tensor lacks these elements.
    """
    count, default_dim = len(shape), unit_dim
    if spec.unit_dim is not None:
        if not -count <= spec.unit_dim < count:
            raise SelectionError("unit_dim", f"dim {spec.unit_dim} is out of range for", f"{-count} to {count - 1}")
        unit_dim = spec.unit_dim % count
    fields: dict[int, str] = {}
    indices: dict[int, tuple[int, ...]] = {}
    for field in spec.selection:
        dim = _dimension(field, count, unit_dim)
        if dim in fields:
            message = f"{fields[dim]!r} and {field!r} both select along dimension {dim} of"
            raise SelectionError(field, message, f"one of {fields[dim]!r} and {field!r}")
        fields[dim] = field
        value = getattr(spec, field)
        if isinstance(value, Heads):
            _check_heads(value, shape, features_last=dim in (default_dim, unit_dim))
            indices[dim] = _indices_of_heads(value, dim, shape[dim])
        else:
            indices[dim] = _checked(field, value, shape[dim], f"dimension {dim} of")
    return indices


def selected_shape(spec: HookBase, shape: Sequence[int], unit_dim: int | None, *, may_exceed: bool) -> tuple[int, ...]:
    """Return the shape of the selected part of a tensor; see `selected_indices`. With `may_exceed`, a slice may end beyond a dimension."""
    if spec.slice is None:
        indices = selected_indices(spec, shape, unit_dim)
        return tuple(len(indices[dim]) if dim in indices else size for dim, size in enumerate(shape))
    parts = parse_slice(spec.slice)
    if len(parts) > len(shape):
        allowed = f"at most {len(shape)} parts between commas" if shape else "no 'slice': a scalar cannot be sliced"
        raise SelectionError("slice", f"the slice has {len(parts)} dimensions, more than", allowed)
    sizes = [*shape]
    if isinstance(first := getattr(spec, "samples", None), int):
        sizes[0] = min(first, sizes[0])
    for dim, (part, size) in enumerate(zip(parts, sizes, strict=False)):
        _check_part(part, dim, size, may_exceed=may_exceed)
    pairs = zip(parts, sizes, strict=False)
    kept = [len(range(*part.indices(size))) for part, size in pairs if not isinstance(part, int)]
    return (*kept, *sizes[len(parts) :])


def _check_part(part: int | slice, dim: int, size: int, *, may_exceed: bool) -> None:
    if isinstance(part, int):
        if not -size <= part < size:
            raise SelectionError("slice", f"{part} is out of range for dimension {dim} of", f"{-size} to {size - 1}")
        return
    bounds = (part.start, part.stop)
    text = ":".join("" if bound is None else str(bound) for bound in (*bounds, *([part.step] if part.step else [])))
    if not may_exceed and any(bound is not None and not -size <= bound <= size for bound in bounds):
        allowed = f"{-size} to {size}; ':' for all of a dimension, 'samples: N' for at most N samples"
        raise SelectionError("slice", f"{text} is out of range for dimension {dim} of", allowed)
    if size and not range(*part.indices(size)):
        raise SelectionError("slice", f"{text} selects nothing along dimension {dim} of", "a start before the stop")


def _dimension(field: str, count: int, unit_dim: int | None) -> int:
    if field == "samples" and count:
        return 0
    if field == "positions" and count > 1 and unit_dim != 1:
        return 1
    if field == "units" and unit_dim is not None:
        return unit_dim
    if field == "heads" and unit_dim is not None:
        return count - 1
    name = {"samples": "samples", "positions": "sequence positions [N, T, ...]"}.get(field, "units")
    raise SelectionError(field, f"{field!r} requires a dimension of {name} in", "'slice' for any dimension")


def _checked(field: str, indices: Sequence[int], size: int, of: str) -> tuple[int, ...]:
    """Return the indices counted from the start."""
    for index in indices:
        if not -size <= index < size:
            raise SelectionError(field, f"{index} is out of range for {of}", f"{-size} to {size - 1}")
    positive = tuple(index % size for index in indices)
    if len({*positive}) < len(positive):
        raise SelectionError(field, f"two indices are the same along {of}", "each index once")
    return positive


def _check_heads(heads: Heads, shape: Sequence[int], *, features_last: bool) -> None:
    """Refuse `heads` if the tensor has a separate dimension of heads, such as in [N, heads, T, D] and [N, T, heads, D]."""
    dims = [dim for dim in range(1, len(shape) - 1) if shape[dim] == heads.of] if len(shape) >= 4 else []
    if dims:
        names = " or ".join(map(str, dims))
        message = f"'heads' divides the last dimension, but dimension {names} contains the {heads.of} heads of"
        allowed = f"'units: [...]' with 'unit_dim: {names}' for these heads, or 'slice' for the last dimension"
        raise SelectionError("heads", message, allowed)
    if not features_last:
        message = "'heads' divides the last dimension, but the heads are not side by side there in"
        allowed = "'units: [...]', with 'unit_dim' if the heads are not dimension 1, or 'slice' for any dimension"
        raise SelectionError("heads", message, allowed)


def _indices_of_heads(heads: Heads, dim: int, size: int) -> tuple[int, ...]:
    if size % heads.of:
        divisors = [number for number in range(1, size + 1) if size % number == 0]
        nearest = sorted(sorted(divisors, key=lambda number: abs(number - heads.of))[:3])
        message = f"{heads.of} heads do not divide dimension {dim} of"
        raise SelectionError("heads.of", message, f"a divisor of {size}, such as {', '.join(map(str, nearest))}")
    length = size // heads.of
    taken = _checked("heads.take", heads.take, heads.of, f"the {heads.of} heads of")
    return tuple(head * length + i for head in taken for i in range(length))
