"""Rules for cutting text into words before merging, by the names that GGUF files use."""

from __future__ import annotations

from twostroke.core.errors import ModelFormatError, nearest
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer.words import (
    BEFORE_THOUSANDS,
    DIGIT,
    GPT2,
    NUMBER_THOUSANDS,
    THOUSANDS,
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:%s)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:%s)?"
)
_SLASHED = _REST.replace(r"+[\r\n]*|", r"+[\r\n/]*|")
_TEKKEN = _CASED.replace("(?:%s)?", "") + r"|\p{N}|" + _SLASHED
_GPT4O = _CASED.replace("%s", _CONTRACTIONS) + r"|\p{N}{1,3}|" + _SLASHED
# moonshotai/Kimi-K2-Instruct tokenization_kimi.py: words leave out Han characters.
_NOT_HAN = r"(?:(?!\p{Han})%s)"
_KIMI_K2 = (
    r"\p{Han}+|"
    + _CASED.replace("%s", _CONTRACTIONS)
    .replace(f"{_UPPER}", _NOT_HAN % _UPPER)
    .replace(f"{_LOWER}", _NOT_HAN % _LOWER)
    + r"|\p{N}{1,3}|"
    + _REST
)
# tencent/Youtu-LLM-2B tokenizer.json.
_YOUTU_SCRIPTS = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _LLAMA3.replace(
    r"\s+(?!\S)|\s+",
    "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s",
)
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_LINES = r"[^\n]+|[\n]+"
_HAN, _HAN_WIDE = "[一-龥\u3040-\u309f\u30a0-\u30ff]+", "[一-龥\u0800-一가-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters that the first DeepSeek's tokenizer.json lists: letters with a case in an older
# Unicode version, except mathematical letters.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_SPARK = _DEEPSEEK3.replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|", r"[\p{P}\p{S}]+|[\r\n]|")
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(?:IMGIMG)(?:[A-I]{1,4})Z",
    r"[\t\n]|    |  ",
    DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    GPT2,
)


class PreTokenizer(Frozen):
    """A rule by which a tokenizer cuts text into words before merging.

    `patterns` apply one after the other: each pattern cuts the words that the previous one made.
    Matches of a pattern, and the text between matches, become words. With `ignore_merges` a word
    that is a token stays unmerged. `nfc` composes characters first. `add_bos` is the default if the
    file does not tell. `ranks_by_id` is for files without a list of merges: tokens with lower ids
    are merged first, as in tiktoken.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False
    ranks_by_id: bool = False


_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), nfc=True)
_DIGITS_FIRST = PreTokenizer((DIGIT, GPT2))
_GPT2_LIKE = PreTokenizer((GPT2,))
_GPT4O_LIKE = PreTokenizer((_GPT4O,))
_DEEPSEEK3_LIKE = PreTokenizer((r"\p{N}{1,3}", _HAN, _DEEPSEEK3))
_BLOOM_LIKE = PreTokenizer((_BLOOM,))
_BAILING_LIKE = PreTokenizer((_BAILING,))
_TINY_AYA_LIKE = PreTokenizer((THOUSANDS, _GPT4O))

# Sources: the tokenizer.json of the models named. llama.cpp writes these names (llama-vocab.cpp),
# and transformers reads them (gguf_tokenizer_mapping.py).
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # A file without a name, as llama.cpp reads it.
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "exaone4": _GPT2_LIKE,
    "a.x-4.0": _GPT2_LIKE,
    "gigachat": _GPT2_LIKE,
    "granite-docling": _GPT2_LIKE,
    "jais": _GPT2_LIKE,
    "jina-de": _GPT2_LIKE,
    "jina-es": _GPT2_LIKE,
    "jina-v2-de": _GPT2_LIKE,
    "jina-v2-es": _GPT2_LIKE,
    "mellum": _GPT2_LIKE,
    "modern-bert": _GPT2_LIKE,
    "trillion": _GPT2_LIKE,
    # Single digits, then ByteLevel with its own pattern.
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "command-r": _DIGITS_FIRST,
    "codeshell": _DIGITS_FIRST,
    "exaone": _DIGITS_FIRST,
    "mellum2": _DIGITS_FIRST,
    "minerva-7b": _DIGITS_FIRST,
    "falcon": PreTokenizer((_PUNCTUATION, GPT2, r"[0-9][0-9][0-9]")),
    # meta-llama/Meta-Llama-3 tokenizer.json.
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "llama-bpe": _LLAMA3_LIKE,
    "falcon3": _LLAMA3_LIKE,
    "pixtral": _LLAMA3_LIKE,
    "falcon-h1": _LLAMA3_LIKE,
    "jina-v5-nano": _LLAMA3_LIKE,
    "lfm2": _LLAMA3_LIKE,
    "midm-2.0": _LLAMA3_LIKE,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True
    ),
    # Qwen/Qwen2 tokenizer.json, which normalizes to NFC.
    "qwen2": _QWEN2_LIKE,
    "deepseek-r1-qwen": _QWEN2_LIKE,
    "f2llmv2": _QWEN2_LIKE,
    "megrez": _QWEN2_LIKE,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "grok-2": PreTokenizer((_QWEN2,)),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "kormo": PreTokenizer((_QWEN2,)),
    "solar-open": PreTokenizer((_QWEN2,)),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    # mistralai/Mistral-Nemo tokenizer.json.
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_LIKE,
    "llama4": _GPT4O_LIKE,
    "kanana2": _GPT4O_LIKE,
    "minimax-m2": _GPT4O_LIKE,
    "talkie": _GPT4O_LIKE,
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya": _TINY_AYA_LIKE,
    "cohere2moe": _TINY_AYA_LIKE,
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_WIDE, r"\p{N}"),
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_WIDE,
            DIGIT,
        ),
    ),
    "deepseek-v3": _DEEPSEEK3_LIKE,
    "hunyuan-dense": _DEEPSEEK3_LIKE,
    "hy_v4": _DEEPSEEK3_LIKE,
    "joyai-llm": _DEEPSEEK3_LIKE,
    "spark2_5": PreTokenizer((r"\p{N}{1,3}", _HAN, _SPARK, DIGIT)),
    "afmoe": PreTokenizer((NUMBER_THOUSANDS, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "kimi-k2": PreTokenizer((_KIMI_K2,), ignore_merges=True, ranks_by_id=True),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignore_merges=True),
    "chameleon": PreTokenizer(_CHAMELEON, add_bos=True),
    "bloom": _BLOOM_LIKE,
    "gpt3-finnish": _BLOOM_LIKE,
    "poro-chat": _BLOOM_LIKE,
    "viking": PreTokenizer((_BLOOM, DIGIT)),
    "bailingmoe": _BAILING_LIKE,
    "bailingmoe2": _BAILING_LIKE,
    "llada-moe": _BAILING_LIKE,
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "superbpe": PreTokenizer((r"\p{N}+", BEFORE_THOUSANDS)),
}


# Names in files with SentencePiece's spelling of tokens, whose text is not cut into words.
SENTENCEPIECE_NAMES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer with this GGUF name; raise ModelFormatError if it is unknown."""
    result = PRE_TOKENIZERS.get(name)
    if result is None:
        names = ", ".join(PRE_TOKENIZERS)
        raise ModelFormatError(
            f"The model's pre-tokenizer '{name}' (tokenizer.ggml.pre) is not known; "
            f"known are {names}.{nearest(name, PRE_TOKENIZERS)}"
        )
    return result
