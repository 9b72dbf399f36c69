"""What the command lines share: options built from the dataclasses, the compilation cache, errors in one line."""

import argparse
import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_type_hints

import jax
import platformdirs

from jkv.config import CacheSpec
from jkv.policies import Policy, describe, entry, names
from jkv.run import GenerationConfig

MODEL_HELP = "Hugging Face folder or hub id, GGUF file, or folder written by weights.convert; default: embedded model"


class Parser(argparse.ArgumentParser):
    """Reports a bad option as any other error; argparse itself prints the whole usage and exits."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(f"{message}; --help lists the options")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, --revision, --dtype and --implementation."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and cache; auto is the checkpoint's own; default: float32 on CPU, half precision elsewhere",
    )
    group.add_argument(
        "--implementation",
        choices=("xla", "triton", "mosaic"),
        help="what runs attention and eviction; default: xla on CPU, triton on a GPU",
    )


def add_policy_option(parser: argparse.ArgumentParser) -> None:
    """Adds --policy."""
    parser.add_argument(
        "--policy",
        default="full",
        metavar="NAME[:FIELD=VALUE,...]",
        help="what the cache keeps, as gkv:budget=512,alpha=0.8 or ./mine.py:Mine,budget=512; default: %(default)s",
    )


def add_template_option(group: argparse._ArgumentGroup) -> None:
    """Adds --template-arg."""
    group.add_argument(
        "--template-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value for the chat template, as enable_thinking=false (may be repeated)",
    )


def add_batch_options(group: argparse._ArgumentGroup) -> None:
    """Adds --samples, and --slots, of which None is as many as fit."""
    group.add_argument("--samples", type=int, default=1, metavar="N", help="answers for each prompt (default: 1)")
    group.add_argument(
        "--slots",
        type=_parse_slots,
        default=8,
        metavar="N",
        help="answers decoded together; when one ends, its slot is given to the next; auto is as many as fit in memory "
        "(default: 8)",
    )


def check_batch_options(options: argparse.Namespace) -> None:
    """Raises ValueError where --samples or --slots is out of range."""
    if options.samples < 1 or (options.slots is not None and options.slots < 1):
        raise ValueError(f"--samples {options.samples} and --slots {options.slots} must be at least 1")


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each field of `GenerationConfig`; an option that is not given stays None."""
    group = parser.add_argument_group("drawing an answer")
    hints, docs = get_type_hints(GenerationConfig), field_docs(GenerationConfig)
    for spec in dataclasses.fields(GenerationConfig):
        flag, kind = "--" + spec.name.replace("_", "-"), hints[spec.name]
        if kind is bool:
            group.add_argument(flag, action="store_true", default=None, help=docs[spec.name])
        elif kind in (int, float):
            text = f"{docs[spec.name]} (default: {spec.default})"
            group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text.replace("%", "%%"))
        else:
            group.add_argument(flag, action="append", metavar="TEXT", help=docs[spec.name] + " (may be repeated)")


def generation_changes(options: argparse.Namespace) -> dict[str, Any]:
    """The `GenerationConfig` fields that were given on the command line."""
    given = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(GenerationConfig)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """Runs a command: an error that a user can mend is one line on stderr and exit code 2; Ctrl-C is 130."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in argv
    try:
        return main(argv)
    except ValueError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a folder that is not writable
        if debug:
            raise
        print(f"error: {error}; give another path, or make room there", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if debug or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"error: out of memory: {str(error).splitlines()[0]}; --dry-run shows what this run holds", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache, unless the user has chosen a place."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(platformdirs.user_cache_path("jkv") / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        # A cache that cannot be written costs time, no more.
        warnings.filterwarnings("ignore", message=".*persistent compilation cache")
        # With a limit, jax locks the folder and writes whole files only.
        jax.config.update("jax_compilation_cache_max_size", 4 << 30)


def list_policies() -> str:
    """One line a policy: its name and what it does; presets below their values."""
    lines = []
    for name in names():
        known = entry(name)
        about = known.about or (inspect.getdoc(type(known.policy)) or "").splitlines()[0]
        lines.append(f"{name:14} {about}")
    return "\n".join([*lines, "", "--explain NAME tells more; --policy NAME:FIELD=VALUE,... changes fields"])


def explain(name: str) -> str:
    """A policy's documentation, its fields with their defaults, and its paper.

    Raises:
        ValueError: no such policy.
    """
    known = entry(name)
    policy, docs = known.policy, field_docs(type(known.policy))
    text = (inspect.getdoc(type(policy)) or "").split("\nAttributes:")[0].rstrip()
    lines = [name + (f" ({known.about})" if known.about else ""), "", text, "", "Fields and defaults:"]
    lines += [f"  {field} = {value!r}\n      {docs.get(field, '')}" for field, value in describe(policy)]
    lines += ["", *describe_reading(policy)]
    if policy.paper:
        lines += ["", f"Paper: {policy.paper}"]
    return "\n".join(lines)


def describe_reading(policy: Policy) -> list[str]:
    """What a step reads in a model of 32 layers with 8 kv heads of 128, after a long prompt and a short answer."""
    prompt, answer, layers = 30720, 2048, 32
    length = prompt + answer
    spec = CacheSpec(
        num_kv_heads=8, group=4, head_dim=128, max_len=length, max_new=answer, max_prompt=prompt, dtype="bfloat16"
    )
    of_layers = [policy.at(layer, layers) for layer in range(layers)]
    share = sum(own.bytes_read(spec, length) for own in of_layers) / (layers * Policy().bytes_read(spec, length))
    tokens = " + ".join(f"{count:,} {part}" for part, count in of_layers[-1].tokens_read(spec, length).items())
    return [
        f"Read in the last step of an answer of {answer:,} tokens to a prompt of {prompt:,}: {tokens} tokens",
        f"per kv head; {share:.1%} of the bytes that full attention reads (32 layers, 8 kv heads of 128).",
    ]


def field_docs(cls: type) -> dict[str, str]:
    """What the "Attributes:" sections of a dataclass and its bases say of each field."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        current: list[str] = []
        for line in section.splitlines():
            if line.strip() and not line.startswith(" "):
                break
            name, colon, text = line.strip().partition(": ")
            if line.startswith("    ") and not line.startswith("     ") and colon:
                current = [key.strip() for key in name.split(",")]
                docs.update(dict.fromkeys(current, text.strip()))
            else:
                docs.update({key: f"{docs[key]} {line.strip()}".strip() for key in current})
    return docs


def _parse_slots(text: str) -> int | None:
    """None is as many as fit."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or auto")
    return None if text == "auto" else int(text)


def parse_template_arguments(items: Sequence[str]) -> dict[str, Any]:
    """``["enable_thinking=false"]`` as a dict; values are JSON where they can be, else text.

    Raises:
        ValueError: an item without "=".
    """
    arguments: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ValueError(f"--template-arg {item!r} must be NAME=VALUE, as in enable_thinking=false")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments
