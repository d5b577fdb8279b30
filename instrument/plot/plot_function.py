"""The decorator and the registry of plot functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec

from ..errors import InstrumentError, Problem, similar_names
from ..fields.registry import Registry
from .fit import fit
from .look import CURRENT, Current, Look, current, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
NARROWEST = 2.0  # minimum width of a figure, in inches
CHECKS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "width": (
        lambda width: isinstance(width, int | float) and width >= NARROWEST,
        "must be a width in inches",
        f"{NARROWEST:g} or more",
    ),
    "labels": (lambda labels: isinstance(labels, Mapping), "must be a mapping of texts to texts", ""),
    "scale": (lambda scale: scale in ("linear", "log"), "unknown scale", "linear, log"),
    "interval": (
        lambda level: isinstance(level, int | float) and 0 <= level < 1,
        "must be a confidence level",
        "0 to less than 1",
    ),
    "ax": (lambda ax: hasattr(ax, "get_subplotspec"), "must be axes of matplotlib", ""),
}  # by argument: whether a value is allowed, the message otherwise, and what is allowed
PLOTS: Registry[Any] = Registry(
    "plots",
    "plot",
    builtin={
        "attention": "instrument.interpret.attention_plot:attention",
        "class_activation_map": "instrument.interpret.class_activation_plot:class_activation_map",
        "layer_similarity": "instrument.interpret.layer_similarity_plot:layer_similarity",
        "logit_lens": "instrument.interpret.logit_lens_plot:logit_lens",
        "patching": "instrument.interpret.patching:patching",
    },
)


def plot(**refused: str) -> Callable[[Callable[P, Figure]], Callable[P, Figure]]:
    """Register a plot function, let it take the arguments of `Look`, and give its figure the common style.

    Args:
        refused: Arguments that have no meaning for the plot, with the reason.
    """

    def decorate(function: Callable[P, Figure]) -> Callable[P, Figure]:
        own = {
            name
            for name, parameter in signature(function).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        }

        @wraps(function)
        def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
            names = [name for name in CHECKS if name in kwargs and name not in own]
            look: Any = {name: kwargs.pop(name) for name in names}
            if unknown := sorted(kwargs.keys() - own):
                similar = similar_names(unknown[0], [*own, *CHECKS])
                raise InstrumentError(Problem(unknown[0], f"{function.__name__} has no such argument", similar=similar))
            _check(look, function.__name__, refused)
            with style():
                token = CURRENT.set(Current(look))
                try:
                    others = [] if current().ax is None else current().ax.get_figure(root=True).axes  # type: ignore[union-attr]
                    figure = function(*args, **kwargs)
                    fit(figure, [axes for axes in figure.axes if axes not in others or axes is current().ax])
                finally:
                    CURRENT.reset(token)
            return figure

        draw.refused = refused  # type: ignore[attr-defined]
        if function.__name__ not in PLOTS.builtin:
            PLOTS.register(function.__name__)(draw)
        return draw

    return decorate


def _check(look: Look, name: str, refused: Mapping[str, str]) -> None:
    for key, reason in refused.items():
        if look.get(key) is not None:
            takes = [other for other, plot in PLOTS.items() if key not in getattr(plot, "refused", {key: ""})]
            raise InstrumentError(
                Problem(key, f"{name} {reason}", repr(look.get(key)), f"in {', '.join(sorted(takes))}")
            )
    for key, (is_right, message, allowed) in CHECKS.items():
        if (value := look.get(key)) is not None and not is_right(value):
            raise InstrumentError(Problem(key, message, f"{value!r} ({type(value).__name__})", allowed))
    if look.get("ax") is not None and look.get("width") is not None:
        raise InstrumentError(
            Problem("width", "axes have the width of their figure", look.get("width"), fix="omit width or ax")
        )
