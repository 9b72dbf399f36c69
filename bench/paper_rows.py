"""The 58 rows of the throughput tables of the G-KV and the SpeContext paper, each as one static config."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from bench.engines import make_engine, make_policy
from bench.models import MODELS
from jkv.engine import Engine
from pallas_kernels.dispatch import Implementation
from pallas_kernels.shapes import Cache

FILE = Path(__file__).parent / "paper_throughput.json"
INTERVAL = 128  # tokens between two compactions, in both papers' codes
PROBLEM, ANSWER = 256, 16384  # tokens that stand for a problem of DeepScaleR and its answer
SELECTED = 2048  # tokens that a step reads in every row of the SpeContext paper
CARD = "a100"  # of `gpu_target.TARGETS`; the SpeContext paper names it, the G-KV paper names none

NAMES = {
    "DeepSeek-Qwen-Distill-7B": "qwen-7b",
    "DeepSeek-Llama-Distill-8B": "llama-8b",
    "DeepSeek-Distill-Llama-8B": "llama-8b",
    "Qwen3-8B": "qwen3-8b",
}
# The first part of a row's name, and the policy that runs it.
METHODS = {
    "G-KV": ("gkv", "gkv"),
    "R-KV": ("rkv", "rkv@gkv"),
    "Full-KV": ("full", "full"),
    "SpeContext": ("specontext", "specontext"),
    "ShadowKV": ("shadowkv", "shadowkv"),
    "Full Attn (FlashInfer)": ("flashinfer", "full"),
    "Full Attn (Flash Attn)": ("flash", "full:attention=flash"),
    "Full Attn (Eager)": ("eager", "full:attention=eager"),
}
GKV, SPECONTEXT = PAPERS = ("gkv-paper", "specontext-paper")
PROTOCOLS = {
    GKV: (
        "1,024 problems of DeepScaleR, one answer each, sampled at temperature 0.6 and top-p 0.95 until its end; new "
        "tokens over all seconds, prompts included. Lengths are not given: here prompts of "
        f"{PROBLEM} tokens and answers of {ANSWER:,} that ignore the end of the text stand for them."
    ),
    SPECONTEXT: (
        "prompts and answers of one length each; new tokens over seconds. Whether reading the prompts counts is not "
        "said: here they are read outside the time of decoding, and both rates are given. ShadowKV keeps what it "
        "decodes, which its released code drops; SpeContext chooses by the model's first layer."
    ),
}


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One row of a table.

    Attributes:
        name: method, model, batch and what the row varies.
        paper: of `PAPERS`.
        method: as the paper calls it.
        model: of `models.MODELS`.
        policy: its name, or its text where it has no budget.
        batch: rows decoded together.
        budget: tokens that are kept or read; None with full attention.
        prompt, new: tokens of each text.
        tokens_per_second: what the paper gives, of all rows together.
    """

    name: str
    paper: str
    method: str
    model: str
    policy: str
    batch: int
    budget: int | None
    prompt: int
    new: int
    tokens_per_second: float

    @property
    def shape(self) -> str:
        """The name of its cache among `CACHES`."""
        if self.budget is None:
            return f"b{self.batch}-full-{_thousands(self.prompt)}-{_thousands(self.new)}"
        lengths = f"{_thousands(self.prompt)}{_thousands(self.new)}"
        return f"b{self.batch}-" + (f"k{self.budget}" if self.evicts else lengths)

    @property
    def evicts(self) -> bool:
        """Whether tokens leave its cache."""
        return self.paper == GKV and self.budget is not None

    @property
    def text(self) -> str:
        """The policy with its budget, as a user gives it."""
        if self.budget is None:
            return self.policy
        return f"{self.policy}:budget={self.budget}" + (f",interval={INTERVAL}" if self.evicts else "")

    @property
    def cache(self) -> Cache:
        """The store of one of its layers."""
        length = self.prompt + self.new
        kept = self.budget or length
        capacity = kept + INTERVAL if self.evicts else length
        return Cache(batch=self.batch, capacity=capacity, kept=kept, prompt=self.prompt)

    def engine(self, implementation: Implementation) -> Engine:
        """What decodes it."""
        longest = self.prompt + self.new
        policy = make_policy(self.text)
        return make_engine(MODELS[self.model], policy, implementation, prompt=self.prompt, longest=longest)


@functools.cache
def paper_rows() -> dict[str, PaperRow]:
    """All rows by name, in the order of the tables."""
    rows = (_make_row(record) for record in json.loads(FILE.read_text()))
    return {row.name: row for row in rows}


def find_rows(names: list[str]) -> list[PaperRow]:
    """Rows by their names or those of the papers.

    Raises:
        ValueError: there is no such row.
    """
    rows, found = paper_rows(), dict[str, PaperRow]()
    for name in names:
        chosen = {n: row for n, row in rows.items() if name in (n, row.paper)}
        if not chosen:
            raise ValueError(f"no row {name!r}; --list names all of them, and {' and '.join(PAPERS)} are whole tables")
        found |= chosen
    return list(found.values())


def paper_caches() -> dict[str, Cache]:
    """The stores of all rows, by the names that the compile gate calls them."""
    return {row.shape: row.cache for row in paper_rows().values()}


def selecting_shapes() -> frozenset[str]:
    """The names of those of which a step reads a part."""
    return frozenset(row.shape for row in paper_rows().values() if row.paper == SPECONTEXT and row.budget)


def _make_row(record: dict) -> PaperRow:
    method, policy = METHODS[record["method"]]
    paper = GKV if "G-KV" in record["source"] else SPECONTEXT
    prompt, new = record.get("input_len", PROBLEM), record.get("output_len", ANSWER)
    budget = None if policy.startswith("full") else record.get("budget", SELECTED)
    model, batch = NAMES[record["model"]], record["batch"]
    varied = f"k{budget}" if budget and paper == GKV else f"{_thousands(prompt)}-{_thousands(new)}"
    return PaperRow(
        name=f"{method}/{model}/b{batch}/{varied}",
        paper=paper,
        method=record["method"],
        model=model,
        policy=policy,
        batch=batch,
        budget=budget,
        prompt=prompt,
        new=new,
        tokens_per_second=record["tokens_per_s"],
    )


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
