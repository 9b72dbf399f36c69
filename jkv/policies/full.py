"""Full attention: the baseline that every other policy is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from jkv.policies.base import Policy
from jkv.policies.registry import register


@register("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps every token and reads all of them.

    Exact: the model's own attention.
    """

    paper: ClassVar[str] = "https://arxiv.org/abs/1706.03762"
