"""Chat templates: Jinja text that comes with a checkpoint, rendered in a sandbox as transformers renders it."""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplate:
    """A chat template, compiled when it is first used."""

    def __init__(self, text: str, *, source: str):
        """Keeps the Jinja `text`; `source` is what error messages call its owner, a folder for instance."""
        self._text, self._source = text, source

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on.
            values: everything else that the template may look at, by name.

        Raises:
            ValueError: the messages are not messages, or the template is faulty or refuses them.
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError("messages must be a list of at least one {'role': 'user', 'content': '...'}")
        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"message {number} must be like {{'role': 'user', 'content': '...'}}, not {message!r:.80}"
                )
        if "messages" in values:
            raise ValueError("the template argument 'messages' is taken by the conversation; choose another name")
        template = self._compiled
        try:
            return template.render(values, messages=messages)
        except Exception as error:  # whatever the checkpoint's own code raises
            raise ValueError(
                f"{self._source}: the chat template refused the messages ({self._describe(error)}); "
                "change their roles or fields, or use --raw"
            ) from error

    def find_unused(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that the template never looks at, sorted."""
        return sorted(set(names) - jinja2.meta.find_undeclared_variables(self._parsed))

    @functools.cached_property
    def _parsed(self) -> jinja2.nodes.Template:
        try:
            return self._environment.parse(self._text)
        except jinja2.TemplateError as error:
            raise ValueError(f"{self._source}: faulty chat template ({self._describe(error)}); use --raw") from error

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.from_string(self._parsed)

    @functools.cached_property
    def _environment(self) -> jinja2.Environment:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        return environment

    @staticmethod
    def _describe(error: Exception) -> str:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}`, which marks what a model is trained on and adds no text."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _dump_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
