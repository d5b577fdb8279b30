"""What `action: record` can say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from .base import HookBase, SliceText, UnknownNameError
from .fields import Count
from .statistics import ALL, DEFAULT

Statistics = Annotated[
    Literal["default", "all", "none"] | tuple[str, ...],
    WithJsonSchema(
        {"anyOf": [{"enum": ["default", "all", "none", *ALL]}, {"type": "array", "items": {"enum": list(ALL)}}]}
    ),
]
DEFAULT_LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
DEFAULT_BINS, MOST_BINS = 64, 4096


def _levels(value: Any) -> Any:
    if isinstance(value, bool):
        return DEFAULT_LEVELS if value else None
    return (value,) if isinstance(value, int | float) else value


def _bins(value: Any) -> Any:
    return (DEFAULT_BINS if value else None) if isinstance(value, bool) else value


Levels = Annotated[
    tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None,
    Field(min_length=1, max_length=1000),
    BeforeValidator(_levels),
    AfterValidator(lambda levels: levels and tuple(sorted(set(levels)))),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "boolean"},
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 1},
            ]
        }
    ),
]
Bins = Annotated[
    Annotated[int, Field(ge=2, le=MOST_BINS)] | None,
    BeforeValidator(_bins),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2, "maximum": MOST_BINS}]}),
]


class RecordSpec(HookBase):
    """Write down statistics of the tensor, its distribution, the tensor itself, or several of these. Changes nothing."""

    action: Literal["record"]
    stats: Statistics = Field("default", description="Which statistics.")
    quantiles: Levels = Field(
        None, description=f"Quantiles at these levels, from 0 to 1; true for {', '.join(map(str, DEFAULT_LEVELS))}."
    )
    histogram: Bins = Field(
        None, description=f"Counts in so many equal parts from the smallest to the largest; true for {DEFAULT_BINS}."
    )
    tensors: bool = Field(False, description="Whether the values are kept too.")
    samples: Count | None = Field(None, description="Keep the first N along dimension 0.")
    slice: SliceText | None = Field(None, description="Keep this part, in NumPy's notation: '0:4, :, ::2'.")
    max_elements: Count | None = Field(None, description="Keep no more than the first N elements, flat.")
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = Field(
        None, description="Convert before keeping."
    )

    @field_validator("stats", mode="before")
    @classmethod
    def _known_statistics(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("default", "all", "none"):
            value = [value]
        for name in value if isinstance(value, list | tuple) else ():
            if name not in ALL:
                raise UnknownNameError("statistic", str(name), ALL)
        return value

    @model_validator(mode="after")
    def _records_something(self) -> RecordSpec:
        if not self.tensors and not self.statistics and not self.distribution:
            raise ValueError(
                "records nothing: 'stats' is none, and neither tensors, quantiles nor a histogram are asked for"
            )
        cuts = {"samples", "slice", "max_elements", "dtype"} & self.model_fields_set
        if cuts and not self.tensors:
            raise ValueError(f"{', '.join(sorted(cuts))} cut recorded tensors: say 'tensors: true' too")
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names asked for, in the order of the columns."""
        asked = {"default": DEFAULT, "all": ALL, "none": ()}[self.stats] if isinstance(self.stats, str) else self.stats
        return tuple(name for name in ALL if name in asked)

    @property
    def distribution(self) -> bool:
        """Whether quantiles or a histogram are asked for."""
        return self.quantiles is not None or self.histogram is not None
