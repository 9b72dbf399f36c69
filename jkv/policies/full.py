"""Full attention: the baseline that every other policy is compared with."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jkv.policies.base import Policy
from jkv.policies.registry import register


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token and reads all of them.

    Exact: the model's own attention.

    Attributes:
        attention: how a step reads the cache: "eager" multiplies it out at once, "flash" calls cuDNN, "splitk" is the
            split kernel of this project; "auto" is the quickest where it runs.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1706.03762"

    attention: Literal["auto", "eager", "flash", "splitk"] = "auto"

    @property
    def implementation(self) -> str | None:
        """The implementation that `attention` asks for."""
        return {"auto": None, "eager": "eager", "flash": "cudnn", "splitk": "triton"}[self.attention]
