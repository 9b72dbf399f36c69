"""Makes a Hugging Face tokenizer of a GGUF file's vocabulary.

A GGUF file holds the vocabulary, the merges or scores and the kind of each token, but of the pre-tokenizer only a name.
The rules behind the names are those of the models' own tokenizers, and other readers of GGUF files depart from them.
transformers 5 cuts text as GPT-2 does for a name that it does not know ("smollm": its numerals stay together, which
shows outside ASCII), leaves out Qwen2's NFC and Llama 3's look-up of whole words, and takes no control token that has
a character outside the byte alphabet (DeepSeek's). llama.cpp normalises nothing and keeps DeepSeek LLM's numerals
together.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from weights.gguf_header import GgufHeader
from weights.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SPACE = "\u2581"


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """Names and texts of the files that make up the tokenizer.

    Raises:
        ValueError: a kind of tokenizer or a pre-tokenizer that is not supported, or a damaged vocabulary.
    """
    kind = header.get("tokenizer.ggml.model")
    tokens, kinds = _texts(header, "tokens"), _numbers(header, "token_type")
    if not len(tokens) == len(set(tokens)) == len(kinds):
        raise header.error(
            f"the vocabulary has {len(tokens)} tokens, {len(set(tokens))} different ones, and {len(kinds)} token "
            "types; convert the model again"
        )
    if kind == "gpt2":
        rule = _pre_tokenizer(header)
        tokenizer, add_bos = _byte_level(header, tokens, kinds, rule), rule.add_bos
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(header, tokens, kinds), True
    else:
        raise header.error(f"tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' and 'llama'")
    for special, of_kind in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        found = [tokens[i] for i in np.flatnonzero(np.isin(kinds, of_kind))]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in found])
    config = _tokenizer_config(header, tokens, add_bos=add_bos)
    _add_ends(tokenizer, config)
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=1),
    }
    template = header.get("tokenizer.chat_template")
    return files | ({"chat_template.jinja": template} if isinstance(template, str) else {})


def _texts(header: GgufHeader, key: str) -> list[str]:
    value = header.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, list) else []


def _numbers(header: GgufHeader, key: str) -> np.ndarray:
    value = header.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, np.ndarray) else np.empty(0, np.int32)


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        what = "is missing" if name is None else f"{name!r} is not supported"
        raise header.error(
            f"tokenizer.ggml.pre {what}; supported are {', '.join(PRE_TOKENIZERS)}; "
            "otherwise use the model's safetensors checkpoint"
        )
    if header.get("tokenizer.ggml.add_space_prefix"):
        raise header.error("tokenizer.ggml.add_space_prefix is not supported for byte-level vocabularies")
    return PRE_TOKENIZERS[name]


def _byte_level(header: GgufHeader, tokens: list[str], kinds: np.ndarray, rule: PreTokenizer) -> Tokenizer:
    merges = _stored_merges(header)
    if not merges:
        raise header.error("the key tokenizer.ggml.merges is missing; convert the model again")
    # Rows that only pad the embedding are no text: the model's own tokenizer does not have them.
    vocabulary = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if not (kind == _UNUSED and token.startswith("[PAD"))
    }
    tokenizer = Tokenizer(_bpe(header, vocab=vocabulary, merges=merges, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = rule.build()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _sentencepiece(header: GgufHeader, tokens: list[str], kinds: np.ndarray) -> Tokenizer:
    """SentencePiece BPE as Hugging Face converts it: spaces are letters, unknown characters fall back to bytes."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        value = header.get(f"tokenizer.ggml.{key}")
        if value is not None and np.any(value):
            raise header.error(f"tokenizer.ggml.{key} is not supported; use the model's safetensors checkpoint")
    prefix = header.get("tokenizer.ggml.add_space_prefix", True)
    unknown = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN]
    tokenizer = Tokenizer(
        _bpe(
            header,
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_stored_merges(header) or _scored_merges(header, tokens, kinds),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool((kinds == _BYTE).any()),
        )
    )
    spaces = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [*spaces, normalizers.Replace(" ", _SPACE)]
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(header: GgufHeader, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as failure:  # the library raises a bare Exception
        raise header.error(f"the vocabulary and its merges do not fit together ({failure})") from None


def _stored_merges(header: GgufHeader) -> list[tuple[str, str]]:
    pairs = []
    for merge in _texts(header, "merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise header.error(f"the merge {merge!r} is not two tokens; convert the model again")
        pairs.append((left, right))
    return pairs


def _scored_merges(header: GgufHeader, tokens: list[str], kinds: np.ndarray) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for: every way to put a token together, best scored token first."""
    scores = _numbers(header, "scores")
    known = {
        token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (_NORMAL, _USER_DEFINED)
    }
    if len(scores) != len(tokens) or len({scores[i] for i in known.values()}) < 2:
        raise header.error(
            "the vocabulary has neither merges nor scores that order it; use the model's safetensors checkpoint"
        )
    ranked = []
    for token, i in known.items():
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways = [(left, right) for left, right in ways if left in known and right in known]
        ways.sort(key=lambda way: (known[way[0]], known[way[1]]))
        ranked += [(-float(scores[i]), -len(left), -len(right), left, right) for left, right in ways]
    ranked.sort(key=lambda way: way[:3])
    return [(left, right) for *_, left, right in ranked]


def _tokenizer_config(header: GgufHeader, tokens: list[str], *, add_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(header.get("tokenizer.ggml.add_bos_token", add_bos)),
        "add_eos_token": bool(header.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in _SPECIAL_IDS.items():
        token = header.number(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token >= len(tokens):
            raise header.error(
                f"tokenizer.ggml.{key}_token_id {token} is not in the vocabulary of {len(tokens)} tokens"
            )
        if token is not None:
            config[name] = tokens[token]
    return config


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Makes the tokenizer put BOS before and EOS after a text, as far as the file says so and names them."""
    bos = config.get("bos_token") if config["add_bos_token"] else None
    eos = config.get("eos_token") if config["add_eos_token"] else None
    if bos or eos:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=[piece for piece in (bos, "$A", eos) if piece],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token],
        )
