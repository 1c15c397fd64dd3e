"""The tokens that a constraint allows equal the tokens of a slow definition."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import regex

from support.byte_tokenizer import END, byte_tokenizer
from twostroke.backends.sampling.reference import allows_only, as_flags
from twostroke.core.constraint import MAX_CONSTRAINT, NOTATIONS, Constraint, ReasoningSection
from twostroke.core.draft_tree import ROOT, path_to
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.grammar import Grammars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from twostroke.engine.structured_output.grammar import GrammarMatcher
    from twostroke.engine.structured_output.schema.document import Deadline
    from twostroke.model.tokenizer import Tokenizer

UNUSED = 7  # rows of the model that no token has
PATTERNS = [
    rb"(hello|hell|help) world",
    rb"[a-c]+(, [a-c]+)*",
    rb"[0-9]{2,4}-[0-9]{2}",
    rb"(wo|w)*h?",
    "(é|ð|x)+".encode(),
    rb"a",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + UNUSED)


def allowed_after(matcher: GrammarMatcher, output: Sequence[int], size: int) -> NDArray[np.bool_]:
    mask = np.zeros((1, matcher.num_words), np.uint32)
    matcher.masks(output, (), (), mask)
    assert not as_flags(mask[0], 32 * matcher.num_words)[size:].any()
    return as_flags(mask[0], size)


def by_definition(
    tokenizer: Tokenizer, pattern: regex.Pattern[bytes], text: bytes
) -> NDArray[np.bool_]:
    """Return which tokens may follow a text that must match a pattern, by trying each token.

    A token may follow if some matching text begins with the longer text. An end token may follow if
    the whole text matches.
    """
    flags = np.zeros(tokenizer.vocab_size + UNUSED, bool)
    for token in range(tokenizer.vocab_size):
        if token in tokenizer.eos_ids:
            flags[token] = pattern.fullmatch(text) is not None
        elif token not in tokenizer.special_ids:
            longer = text + tokenizer.token_bytes(token)
            flags[token] = pattern.fullmatch(longer, partial=True) is not None
    return flags


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_the_definition(
    tokenizer: Tokenizer, grammars: Grammars, pattern: bytes, seed: int
) -> None:
    rng, compiled = random.Random(seed), regex.compile(pattern)
    matcher = grammars.matcher(Constraint("regex", pattern.decode()))
    output: list[int] = []
    for _ in range(25):
        text = b"".join(map(tokenizer.token_bytes, output))
        expected = by_definition(tokenizer, compiled, text)
        result = allowed_after(matcher, output, expected.size)
        if matcher.forced(output):  # then words are cut as the tokenizer does
            assert np.flatnonzero(result).tolist() == list(matcher.forced(output)[:1])
            assert not (result & ~expected).any()
        else:
            assert np.flatnonzero(result).tolist() == np.flatnonzero(expected).tolist(), text
        token = rng.choice(np.flatnonzero(result).tolist())
        if token in tokenizer.eos_ids:
            break
        output.append(token)


@pytest.mark.parametrize("seed", range(20))
def test_masks_after_drafts_are_those_without_drafts(
    tokenizer: Tokenizer, grammars: Grammars, seed: int
) -> None:
    """Random trees of right and wrong drafts, some with end tokens; the matcher does not move."""
    rng = random.Random(seed)
    constraint = Constraint("regex", rng.choice(PATTERNS).decode())
    size = tokenizer.vocab_size + UNUSED
    shared, output = grammars.matcher(constraint), list[int]()
    for _ in range(4):
        drafts, parents = list[int](), list[int]()
        for i in range(rng.randrange(12)):
            above = [] if i == 0 else path_to(i - 1, parents)  # depth first, as in a step
            parent = rng.choice([ROOT, *above, *above[-1:] * 3])
            path = [*output, *on_path(drafts, parents, parent)]
            likely = possible(grammars, constraint, path, size)
            drafts.append(
                rng.choice(likely) if likely and rng.random() < 0.8 else rng.randrange(size)
            )
            parents.append(parent)
        masks = np.zeros((1 + len(drafts), shared.num_words), np.uint32)
        shared.masks(output, drafts, parents, masks)
        for draft in range(ROOT, len(drafts)):
            path = on_path(drafts, parents, draft)
            if is_possible(grammars, constraint, output, path, size):
                expected = allowed_after(grammars.matcher(constraint), [*output, *path], size)
                result = as_flags(masks[1 + draft], size)
                assert np.flatnonzero(result).tolist() == np.flatnonzero(expected).tolist()
        following = [
            t for t in possible(grammars, constraint, output, size) if t not in tokenizer.eos_ids
        ]
        if not following:
            break
        output.append(rng.choice(following))


def on_path(drafts: Sequence[int], parents: Sequence[int], draft: int) -> list[int]:
    return [drafts[index] for index in path_to(draft, parents)]


def possible(grammars: Grammars, constraint: Constraint, output: list[int], size: int) -> list[int]:
    """Return the tokens that a constraint allows after an output; none if the output is wrong."""
    if not is_possible(grammars, constraint, [], output, size):
        return []
    flags = allowed_after(grammars.matcher(constraint), output, size)
    return [int(token) for token in np.flatnonzero(flags)]


def is_possible(
    grammars: Grammars, constraint: Constraint, output: list[int], path: list[int], size: int
) -> bool:
    matcher, tokens = grammars.matcher(constraint), list(output)
    for token in path:
        if token in matcher.ends or not allowed_after(matcher, tokens, size)[token]:
            return False
        tokens.append(token)
    return True


def test_allowed_drafts_are_counted_and_forced_tokens_found(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    matcher = grammars.matcher(Constraint("regex", "(hello|help) world"))
    words = tokenizer.encode("hello world")
    assert matcher.count_allowed([], words) == len(words)
    assert matcher.count_allowed([], [*words[:1], words[0], *words[1:]]) == 1
    assert matcher.count_allowed(words[:1], words[1:]) == len(words) - 1
    forced = matcher.forced(words[:1])
    assert tokenizer.decode(forced) == " world"[: len(tokenizer.decode(forced))]
    assert forced


def test_choices_are_texts_not_patterns(tokenizer: Tokenizer, grammars: Grammars) -> None:
    texts = ["a.c", "(", 'say "hi"\n', "é|ü", "\\d", "<|im_end|>"]
    constraint = Constraint("choice", json.dumps(texts))
    for text in texts:
        matcher, output = grammars.matcher(constraint), tokenizer.encode(text)
        assert matcher.count_allowed([], output) == len(output)
        flags = allowed_after(matcher, output, tokenizer.vocab_size)
        assert np.flatnonzero(flags).tolist() == sorted(tokenizer.eos_ids)
    assert grammars.matcher(constraint).count_allowed([], tokenizer.encode("abc")) == 1


def test_json_is_written_on_one_line(tokenizer: Tokenizer, grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint("json_schema", '{"type": "object"}'))
    value = {"a": [1, 2.5, None, True], "b": {"c": 'd é " \\ \n'}, "e": {}, "f": []}
    text = tokenizer.encode(json.dumps(value, ensure_ascii=False))
    assert matcher.count_allowed([], text) == len(text)
    spaced = tokenizer.encode(json.dumps(value, indent=1))
    assert matcher.count_allowed([], spaced) < len(spaced)


@pytest.mark.parametrize("text", ['root ::= "a" | "b" root', 'start: "a" | "b" start'])
def test_grammars_may_use_the_notation_of_lark_or_llama_cpp(
    tokenizer: Tokenizer, grammars: Grammars, text: str
) -> None:
    matcher = grammars.matcher(Constraint("grammar", text))
    assert matcher.count_allowed([], tokenizer.encode("bbba")) == 4
    assert matcher.count_allowed([], tokenizer.encode("bab")) == 2


@pytest.mark.parametrize(
    ("notation", "text", "word"),
    [
        ("regex", "(", "regular expression"),
        ("regex", "(?=a)", "regular expression"),
        ("json_schema", "{", "JSON schema"),
        ("json_schema", "[]", "JSON schema"),
        ("json_schema", '{"type": "strnig"}', "JSON schema"),
        ("json_schema", '{"minItems": -1, "type": "array"}', "minItems"),
        ("json_schema", '{"minLength": 2, "maxLength": 1, "type": "string"}', "no value fits"),
        ("json_schema", '{"$ref": "http://127.0.0.1:1/schema"}', "JSON schema"),
        ("grammar", "start: nobody", "nobody"),
        ("grammar", "", "grammar"),
        ("choice", "[]", "choices"),
    ],
)
def test_unusable_constraints_are_refused(
    grammars: Grammars, notation: str, text: str, word: str
) -> None:
    with pytest.raises(RequestError, match="cannot be used") as refusal:
        grammars.matcher(Constraint(notation, text, "field"))
    assert word in str(refusal.value)
    assert refusal.value.field == "field"
    assert "\n" not in str(refusal.value)


def test_constraints_are_bounded_before_they_are_parsed() -> None:
    with pytest.raises(RequestError, match="at most"):
        Constraint("regex", "a" * (MAX_CONSTRAINT + 1))
    with pytest.raises(RequestError, match="one of"):
        Constraint("yaml", "a")
    for notation in NOTATIONS:
        with pytest.raises(RequestError, match=r"field contains '.ud800'"):
            Constraint(notation, "a\ud800", "field")


def test_only_the_constraints_that_were_used_last_are_kept(grammars: Grammars) -> None:
    constraints = [Constraint("regex", f"a{{{count}}}") for count in range(1, 80)]
    for constraint in constraints:
        grammars.matcher(constraint)
        grammars.matcher(constraints[0])
    assert grammars.cached(constraints[-1])
    assert grammars.cached(constraints[0])
    assert not grammars.cached(constraints[1])


def test_a_cached_constraint_does_not_wait_for_others_to_compile(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    cached_constraint, other = Constraint("regex", "a"), Constraint("regex", "b")
    grammars.matcher(cached_constraint)
    compile_, has_begun, may_go_on = grammars._compile, threading.Event(), threading.Event()

    def slow(constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
        has_begun.set()
        assert may_go_on.wait(60)
        return compile_(constraint, deadline)

    monkeypatch.setattr(grammars, "_compile", slow)
    results = []
    thread = threading.Thread(target=lambda: results.append(grammars.matcher(other)))
    thread.start()
    assert has_begun.wait(60)
    assert grammars.cached(cached_constraint)
    assert not grammars.cached(other)
    assert grammars.matcher(cached_constraint).count_allowed((), tokenizer.encode("a")) == 1
    may_go_on.set()
    thread.join(20)
    assert results[0].count_allowed((), tokenizer.encode("b")) == 1


def test_matchers_of_new_requests_are_copied_when_they_are_first_asked(
    tokenizer: Tokenizer,
) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    constraint = Constraint("regex", "ab|cd")
    first = grammars.compile(constraint)
    first_matcher, other = first.for_request(constraint), first.for_request(constraint)
    assert first_matcher._matcher is other._matcher is first._matcher
    [a], [c] = tokenizer.encode("a"), tokenizer.encode("c")
    masks = [allowed_after(first_matcher, [a], tokenizer.vocab_size)]
    masks += [allowed_after(matcher, [], tokenizer.vocab_size) for matcher in (other, first)]
    assert len({id(matcher._matcher) for matcher in (first_matcher, other, first)}) == 3
    assert not masks[0][c]
    assert masks[1][[a, c]].all()
    assert (masks[1] == masks[2]).all()


def test_a_wrong_draft_that_exceeds_a_limit_does_not_fail_the_answer(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    ways = [f'r{i}: "a" "b" "c{i}"' for i in range(1500)]
    names = " | ".join(f"r{i}" for i in range(1500))
    grammar = Constraint("grammar", "\n".join(['start: "a" x | "z"', f"x: {names}", *ways]), "f")
    [wrong], [right] = tokenizer.encode("a"), tokenizer.encode("z")
    matcher = grammars.matcher(grammar)
    masks = np.ones((3, matcher.num_words), np.uint32)
    matcher.masks((), (wrong, wrong), (ROOT, 0), masks)
    assert np.flatnonzero(as_flags(masks[0], tokenizer.vocab_size)).tolist() == [wrong, right]
    assert not masks[1:].any()
    assert matcher.count_allowed((), [wrong, wrong, wrong]) <= 3
    matcher.masks([right], (), (), masks[:1])
    assert np.flatnonzero(as_flags(masks[0], tokenizer.vocab_size)).tolist() == sorted(
        tokenizer.eos_ids
    )
    lost = grammars.matcher(grammar)
    assert list(lost.forced([wrong])) == []
    assert lost.count_allowed([wrong], [wrong]) == 0
    with pytest.raises(RequestError, match=r"positions of its rules|possible at one position"):
        lost.masks([wrong], (), (), masks[:1])


def test_masks_of_end_tokens_are_recognized(tokenizer: Tokenizer, grammars: Grammars) -> None:
    matcher = grammars.matcher(Constraint("regex", "a|ab"))
    mask = np.zeros((1, matcher.num_words), np.uint32)
    for text, only_ends in (("", False), ("a", False), ("ab", True)):
        matcher.masks(tokenizer.encode(text), (), (), mask)
        assert allows_only(mask[0], tokenizer.eos_ids) is only_ends
    assert tokenizer.find(END) in tokenizer.eos_ids


@pytest.mark.parametrize(
    ("constraint", "good"),
    [
        (Constraint("json_schema", '{"const": [1, "a"]}'), '[1, "a"]'),
        (Constraint("regex", "[0-9]{3}"), "123"),
        (Constraint("choice", '["yes", "no"]'), "yes"),
        (Constraint("grammar", 'root ::= "a" | "b" root'), "bba"),
        (Constraint("lark", 'start: TEXT "q"\nTEXT: /a*/'), "aaq"),
    ],
)
@pytest.mark.parametrize("mark", ["think", "special"])
def test_a_constraint_may_follow_a_preface(constraint: Constraint, good: str, mark: str) -> None:
    begin, end = f"<{mark}>", f"</{mark}>"
    tokenizer = byte_tokenizer(odd=(("<special>", 3), ("</special>", 3)))
    grammars = Grammars(tokenizer, tokenizer.vocab_size)

    def is_whole(text: str, preface: ReasoningSection) -> bool:
        matcher = grammars.matcher(replace(constraint, preface=preface))
        tokens = [*tokenizer.encode(text, parse_special=True), tokenizer.find(END)]
        return matcher.count_allowed((), tokens) == len(tokens)

    for thought in ("", "hm", f"hm\n<{end[:-1]} ", good, f"{begin[:-1]}-"):
        assert is_whole(f"{thought}{end}{good}", ReasoningSection("", end))
        assert is_whole(f"{thought}{end}\n\n{good}", ReasoningSection("", end))
        assert is_whole(f"{begin}{thought}{end}{good}", ReasoningSection(begin, end))
        assert not is_whole(f"{thought}{end}{good}?", ReasoningSection("", end))
        assert not is_whole(f"{thought}{end}\n\n\n{good}", ReasoningSection("", end))
        assert not is_whole(f"{thought}{end}", ReasoningSection("", end))
    assert is_whole(good, ReasoningSection(begin, end))
    assert not is_whole(good, ReasoningSection("", end))
    assert not is_whole(f"{begin}hm", ReasoningSection(begin, end))
    assert grammars.cached(constraint) is None


def test_the_reason_of_a_refusal_is_remembered(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    good = Constraint("json_schema", '{"type": "string"}')
    bad = Constraint("json_schema", '{"$ref": "https://example.com"}')
    assert grammars.refusal(bad, only_known=True) is None
    why = grammars.refusal(bad)
    assert why is not None
    assert "names nothing in the schema" in why
    assert grammars.refusal(bad, only_known=True) == why
    assert grammars.refusal(good) is None
    with pytest.raises(RequestError, match="names nothing"):
        grammars.compile(bad)


@pytest.mark.parametrize("notation", ["grammar", "lark"])
@pytest.mark.parametrize(
    "text", ["{}", " {}", '{"grammars": [{"lark_grammar": "start: /a/"}]}', "{"]
)
def test_objects_are_refused_as_grammars(grammars: Grammars, notation: str, text: str) -> None:
    with pytest.raises(RequestError, match="The grammar cannot be used: no rule begins with"):
        grammars.compile(Constraint(notation, text))


@pytest.mark.parametrize("number", ["1..2", "-", "e", "1e999", "1e99999", "0.07"])
def test_the_text_of_a_grammar_may_mention_multiples(grammars: Grammars, number: str) -> None:
    """llguidance's limits depend on `multipleOf` in a grammar, which may be part of a text."""
    mention = f'"multipleOf": {number}'
    rules = f'start: "a" // {mention}'
    for constraint in (
        Constraint("lark", rules),
        Constraint("json_schema", json.dumps({"enum": [mention, "b"]})),
        Constraint("choice", json.dumps([mention, "b"])),
    ):
        size = 32 * grammars.num_words
        assert allowed_after(grammars.matcher(constraint), [], size).any()
