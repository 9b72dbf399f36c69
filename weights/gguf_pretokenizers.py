"""The pre-tokenizers that a GGUF file names: how text is cut into words before byte-level merges, name by name."""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_NUMERAL = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# DeepSeek LLM spells out its letters (most of those with upper and lower case), its marks and its ideographs.
_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f "
    "104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_MARKS = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"
_IDEOGRAPHS = "800-9fa5 ac00-d7ff"


def _letters(ranges: str) -> str:
    """A regular expression's character class of hexadecimal code points and ranges of them."""
    spelled = "".join("-".join(rf"\x{{{point}}}" for point in part.split("-")) for part in ranges.split())
    return f"[{spelled}]"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text.

    Attributes:
        patterns: regular expressions, each applied to the pieces that those before it left; a match is a piece.
        nfc: the text is put into Unicode's NFC first.
        ignore_merges: a piece that is a token is taken whole, without going through the merges.
        add_bos: a text begins with BOS when the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the tokenizers library."""
        # `Digits` is what the models' own tokenizers have for single numerals.
        cuts = [
            pre_tokenizers.Digits(individual_digits=True)
            if pattern == _NUMERAL
            else pre_tokenizers.Split(Regex(pattern), "isolated")
            for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), PreTokenizer(patterns=(_NUMERAL, _GPT2))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), PreTokenizer(patterns=(_LLAMA3,), ignore_merges=True, add_bos=True)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(patterns=(_QWEN2,), nfc=True)),
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?{_letters(_CASED)}+",
            rf"\s?{_letters(_MARKS)}+",
            r"\s+$",
            rf"{_letters(_IDEOGRAPHS)}+",
            _NUMERAL,
        )
    ),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_letters(_IDEOGRAPHS)}+", _NUMERAL)
    ),
    "tekken": PreTokenizer(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
}
