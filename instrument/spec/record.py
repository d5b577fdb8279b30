"""What `action: record` can say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from .base import HookBase, SliceText, UnknownNameError
from .fields import Count
from .statistics import ALL, DEFAULT

Statistics = Annotated[
    Literal["default", "all", "none"] | tuple[str, ...],
    WithJsonSchema(
        {"anyOf": [{"enum": ["default", "all", "none", *ALL]}, {"type": "array", "items": {"enum": list(ALL)}}]}
    ),
]


class RecordSpec(HookBase):
    """Write down statistics of the tensor, the tensor itself, or both. Changes nothing."""

    action: Literal["record"]
    stats: Statistics = Field("default", description="Which statistics.")
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
        if not self.tensors and not self.statistics:
            raise ValueError("records nothing: 'stats' is none and 'tensors' is false")
        cuts = {"samples", "slice", "max_elements", "dtype"} & self.model_fields_set
        if cuts and not self.tensors:
            raise ValueError(f"{', '.join(sorted(cuts))} cut recorded tensors: say 'tensors: true' too")
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names asked for, in the order of the columns."""
        asked = {"default": DEFAULT, "all": ALL, "none": ()}[self.stats] if isinstance(self.stats, str) else self.stats
        return tuple(name for name in ALL if name in asked)
