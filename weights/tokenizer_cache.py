"""Keeps the tokenizers made of GGUF files in the user's cache."""

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from weights.gguf_header import GgufHeader
from weights.gguf_tokenizer import tokenizer_files

# Part of the cache key: raise it whenever the same file is to give another tokenizer.
_VERSION = b"1"


def save_tokenizer(header: GgufHeader) -> Path | None:
    """Writes the file's tokenizer into the user's cache, unless it is there.

    The folder's name is a hash of the tokenizer's metadata, so the same vocabulary in several files is one folder. It
    appears complete or not at all, also when two runs write it at once. Where the cache cannot be written, a temporary
    folder takes its place until the process ends.

    Returns:
        A folder with tokenizer.json, tokenizer_config.json and, when the file has one, chat_template.jinja; None when
        the file has no tokenizer.

    Raises:
        ValueError: a kind of tokenizer or a pre-tokenizer that is not supported, or a damaged vocabulary.
    """
    if header.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return None
    folder = platformdirs.user_cache_path("jkv") / "tokenizers" / _content_hash(header)
    if _is_complete(folder):
        return folder
    files = tokenizer_files(header)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = _write_files(files, folder.parent)
    except OSError:
        return _write_temporary(files, header)
    return _move(partial, folder)


def _content_hash(header: GgufHeader) -> str:
    digest = hashlib.blake2b(_VERSION, digest_size=16)
    for key in sorted(header.keys()):
        if key.startswith("tokenizer."):
            stored = header.stored(key)
            digest.update(f"\n{key} {len(stored)} ".encode() + stored)
    return digest.hexdigest()


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _write_files(files: Mapping[str, str], parent: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=".jkv-", dir=parent))
    try:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _write_temporary(files: Mapping[str, str], header: GgufHeader) -> Path:
    try:
        folder = _write_files(files, None)
    except OSError as failure:
        raise header.error(
            f"its tokenizer can be written neither to the user's cache nor to {tempfile.gettempdir()} "
            f"({failure.strerror}); free some space"
        ) from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _move(partial: Path, folder: Path) -> Path:
    """Gives a complete folder its name; another run's, or a damaged one in the way, is told by looking."""
    for _ in range(2):
        try:
            return partial.rename(folder)
        except OSError:
            if _is_complete(folder):
                shutil.rmtree(partial, ignore_errors=True)
                return folder
            shutil.rmtree(folder, ignore_errors=True)
    return partial
