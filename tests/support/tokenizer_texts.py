"""Varied strings and chats on which tokenizers often differ; the same in every run."""

from __future__ import annotations

import random
import unicodedata

import regex

WRITTEN = """\
Hello world
The quick brown fox jumps over the lazy dog.
I'm sure they'll say it's fine; don't you think we've seen what he'd do?
I'M SURE THEY'LL SAY IT'S FINE
It’s “quoted” – with typographic — marks…
3.14159 and 1,000,000 and 0x1F4A9 and 1e-9
0 00 000 0000 12345678901234567890
a1b2c3 4d5e6f 7 8 9  10   11
2024-02-29T23:59:59.999+05:30
x = 10 if y else 20
①②③ Ⅳ ½ ² ³ ₄ ٣ ४ 五 〇
def f(x: int) -> str:\\n    return f"{x!r:>10}"\\n
for (int i = 0; i < n; ++i) { a[i] <<= 2; }\\n\\t// done\\n
SELECT * FROM "t" WHERE a >= 'b' AND c != NULL;
<html><body class="a">&amp;</body></html>
{"key": [1, 2.5, null, true], "nested": {"a": "b\\\\n"}}
git commit -m "fix: don't crash" && ./run.sh | tee /tmp/log.txt 2>&1
https://example.org/a/b?c=d&e=%20f#g user@example.org
C:\\\\Users\\\\me\\\\file.txt
$$\\\\int_0^\\\\infty e^{-x^2} dx = \\\\frac{\\\\sqrt{\\\\pi}}{2}$$
日本語のテキストとカタカナ、ひらがな。
你好，世界！这是一个测试。
한국어 텍스트입니다. 안녕하세요?
Россия и Україна, ёлка
Ελληνικά ΑΒΓ αβγ ς
مرحبا بالعالم، كيف الحال؟
שלום עולם! מה שלומך?
नमस्ते दुनिया, क्या हाल है?
สวัสดีชาวโลก
ආයුබෝවන් வணக்கம் ನಮಸ್ಕಾರ
გამარჯობა Բարեւ አማርኛ ខ្មែរ မြန်မာ
Tiếng Việt có dấu: ă â đ ê ô ơ ư
Café naïve résumé façade Ångström
Cafe\\u0301 e\\u0301 a\\u030a n\\u0303 composed by hand
ſtrange ’ſ ﬁ ﬂ ﷺ Ａ Ｂ １ ２
😀 👍🏽 🇺🇸 👨‍👩‍👧‍👦 ❤️ 🏳️‍🌈 🫠
🎉🎉🎉 party 🎉 at 10🎉
𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟘𝟙𝟚 𐍈 𓀀
zero\\u200bwidth \\u200djoin\\u200c \\ufeffbom \\u2060
right-to-left \\u202eoverride\\u202c
\\u00a0nbsp\\u00a0 \\u2003em\\u2003 \\u3000ideographic\\u3000
\\u2028line\\u2029paragraph\\u0085next
\\x00nul \\x01 \\x07 \\x1b[31mred\\x1b[0m \\x7f
tabs\\tand\\t\\tmore\\t
line\\nbreaks\\r\\nand\\rmore\\n\\n\\n
   leading and trailing  \x20
 a  b   c    d     e      f       g
\\n \\n  \\n\\t\\n   x
    indented four
\\tindented tab\\n\\t\\tdeeper
!!! ??? ... --- ___ *** ### @@@ %%% ^^^ ~~~ ``` ||| \\\\\\\\
(a)[b]{c}<d>"e"'f'
'a' 's 't 're 've 'm 'll 'd 'S 'x
don''t '''quote'''
--no-flag -x=1 a-b-c a_b_c a.b.c a,b;c:d
<|im_start|>user\\nhi<|im_end|>
<|endoftext|><repo_name><file_sep>
<|im_end <|im_end| im_end|> <| |> < | >
[INST] <<SYS>> <s> </s> [/INST]
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis
camelCaseAndPascalCase snake_case_words SCREAMING_CASE kebab-case-words
McDonald's O'Brien D'Angelo l'été aujourd'hui
ALLCAPS MiXeD cAsE iPhone eBay
The year 1984, page 42, $19.99, 50%, #1, §3, ¶4, ©2024, ™, °C
"""


def texts(num_random: int = 200, seed: int = 1) -> list[str]:
    """Return the written strings and `num_random` more that mix their parts and rare characters.

    They have no surrogates, which have no UTF-8. Some characters have bytes that SmolLM2's
    vocabulary lacks: the handling of such characters is compared, too.
    """
    written = [_read(line) for line in WRITTEN.splitlines()]
    rng = random.Random(seed)
    words = [word for text in written for word in text.split(" ") if word]
    return ["", " ", "  ", "\n", "\t", *written, *(_mixed(rng, words) for _ in range(num_random))]


def old_texts(num_random: int = 200, seed: int = 1) -> list[str]:
    """Return texts without characters that only newer Unicode versions have."""
    varied = texts(num_random, seed)
    new = {
        character
        for character in set("".join(varied))
        if (unicodedata.category(character) == "Cn") != bool(regex.match(r"\p{Cn}", character))
    }
    return [text for text in varied if new.isdisjoint(text)]


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "  1 + 1 = ?\n"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 10 + 10?"},
    ],
    [
        {"role": "system", "content": "Du bist höflich. 日本語も。\n\n"},
        {"role": "user", "content": "def f():\n\treturn 1"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "🎉" * 3},
        {"role": "assistant", "content": "It's a function."},
        {"role": "user", "content": "Thanks"},
    ],
]


def _read(line: str) -> str:
    """Read the backslash escapes of a line that also holds characters as they are."""
    return line.encode("latin-1", "backslashreplace").decode("unicode_escape")


def _mixed(rng: random.Random, words: list[str]) -> str:
    parts = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.55:
            parts.append(rng.choice(words))
        elif kind < 0.65:
            parts.append(str(rng.randrange(10 ** rng.randint(1, 12))))
        elif kind < 0.75:
            parts.append(rng.choice("!?.,;:'\"-_/\\()[]{}<>|@#$%^&*+=~`") * rng.randint(1, 4))
        elif kind < 0.85:
            parts.append(
                chr(rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0xE000, 0x30000)]))
            )
        else:
            parts.append(rng.choice([" ", "  ", "\n", "\n\n", "\t", "\r\n", "   \n ", "\u00a0"]))
        parts.append(rng.choice(["", " ", " ", "  "]))
    return "".join(parts)
