"""A tokenizer from a local folder: text to ids and back, chat messages to a prompt.

It is read straight from tokenizer.json with the `tokenizers` library. That takes a tenth of the time that importing
transformers does, gives the same ids whatever version of it is there, and imports nothing that a checkpoint names
(`auto_map`, `tokenizer_class`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jkv.chat_template import ChatTemplate

_PRIVATE_USE = range(0xE000, 0xF900)  # code points that no text needs


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Reads a tokenizer from a local folder; nothing is downloaded and no code of the folder is run.

    Args:
        folder: holds tokenizer.json, and may hold tokenizer_config.json, special_tokens_map.json and
            chat_template.jinja (which wins over a template inside tokenizer_config.json).

    Raises:
        ValueError: there is no tokenizer.json, or one of the files cannot be read; the message names it.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (folder / name).is_file()]
        remedy = (
            f"only {' and '.join(slow)}; convert once with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            if slow
            else "no tokenizer; copy the tokenizer files of the model there"
        )
        raise ValueError(f"{path} is missing: the folder has {remedy}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a readable tokenizer ({error}); download it again") from error
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= _parse_json(folder / name) if (folder / name).is_file() else {}
    template_file = folder / "chat_template.jinja"
    return Tokenizer(
        backend,
        special_tokens={key: _get_content(value) for key, value in config.items() if key.endswith("_token")},
        chat_template=_read(template_file) if template_file.is_file() else _pick_template(config, folder),
        add_bos=config.get("add_bos_token"),
        source=str(folder),
    )


class Tokenizer:
    """Text to ids and back, and chat messages to a prompt.

    Attributes:
        backend: the `tokenizers.Tokenizer` underneath.
        vocab_size: ids the tokenizer knows, added tokens included; a model's padded vocabulary may be larger.
        bos_id: id that begins a text, or None.
        eos_ids: ids that end a text, as far as the tokenizer knows (a generation config may name more).
        special_ids: ids that `decode` leaves out.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str | None],
        chat_template: str | None = None,
        add_bos: bool | None = None,
        source: str = "this tokenizer",
    ):
        """Wraps a backend.

        Args:
            backend: changed in place: truncation and padding off, the named special tokens marked as special.
            special_tokens: texts by name, such as `bos_token` and `eos_token`; also visible to the chat template.
            chat_template: Jinja text.
            add_bos: whether a raw prompt begins with the BOS; None asks the backend's post-processor.
            source: what error messages call this tokenizer, its folder for instance.

        Raises:
            ValueError: the BOS or EOS is not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend, self._source = backend, source
        self._special_tokens = {name: text for name, text in special_tokens.items() if text is not None}
        for name in ("bos_token", "eos_token"):
            text = self._special_tokens.get(name)
            if text is not None and backend.token_to_id(text) is None:
                raise ValueError(f"{source}: {name} {text!r} is not in the vocabulary; correct tokenizer_config.json")
        backend.add_special_tokens([t for t in self._special_tokens.values() if backend.token_to_id(t) is not None])
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._find_id("bos_token")
        eos = self._find_id("eos_token")
        self.eos_ids = () if eos is None else (eos,)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        if add_bos is None:
            add_bos = self.bos_id is not None and backend.encode("").ids[:1] == [self.bos_id]
        self._prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        breakable = [re.escape(token.content) for token in added.values() if len(token.content.strip()) > 1]
        self._control_text = re.compile(f"(?={'|'.join(breakable) or '(?!)'})(.)", re.DOTALL)
        self._template = None if chat_template is None else ChatTemplate(chat_template, source=source)

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt: one BOS if the model uses one, also where the text already begins with it; no EOS."""
        ids = self._encode(text)
        return ids if ids[:1] == self._prefix else self._prefix + ids

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> str:
        """The chat template applied to `messages`, up to where the answer begins.

        Args:
            messages: `{"role": "user", "content": "..."}` and so on.
            arguments: further values for the template, such as `{"enable_thinking": False}`.

        Raises:
            ValueError: there is no chat template, it refuses the messages, or they are not messages.
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        return self._require_template().render(messages, {**values, **(arguments or {})})

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of `render`, with the BOS that the template writes and no other.

        The text of messages cannot become control ids: an added token's text inside one (`</s>`, `<think>`) is cut
        after its first character and encoded as ordinary text. Assistant messages are the exception, for their
        markers are the model's own and templates look for them.
        """
        text = self.render(messages, arguments)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        broken = [m if m["role"] == "assistant" else self._break_controls(m, mark) for m in messages]
        if broken != list(messages):
            text = self.render(broken, arguments)
        return [i for piece in text.split(mark) for i in self._encode(piece)]

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be called."""
        return self._template is not None

    def unused_arguments(self, arguments: Mapping[str, Any]) -> list[str]:
        """Names among `arguments` that the chat template never looks at, sorted."""
        return self._require_template().find_unused(arguments)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`, without special tokens if so asked; spaces stay as they are, unknown ids are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def _encode(self, text: str) -> list[int]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("the text holds half a character (a lone surrogate); give it as whole UTF-8")
        return self.backend.encode(text, add_special_tokens=False).ids

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise ValueError(f"{self._source} has no chat template: use --raw, or add a chat_template.jinja")
        return self._template

    def _break_controls(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._control_text.sub(rf"\1{mark}", value)
        if isinstance(value, Mapping):
            return {key: self._break_controls(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._break_controls(item, mark) for item in value]
        return value

    def _find_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download it again") from error


def _parse_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object; download it again")
    return parsed


def _get_content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _pick_template(config: Mapping[str, Any], folder: Path) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(
                f"{folder}: none of the chat templates {sorted(named)} is 'default'; add chat_template.jinja"
            )
        return named["default"]
    return template
