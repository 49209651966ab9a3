"""Grammars, what they compile to, and what a session says: always a function of the answer alone."""

from __future__ import annotations

import importlib.util
import json
import pickle
import random
import subprocess
import sys
import threading
from typing import Any

import jsonschema
import llguidance.hf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from llguidance import LLMatcher
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from typing_extensions import TypedDict

from metasd_langchain.constraints import Grammar, choice, json_rule, json_schema, lark, regex
from metasd_langchain.constraints import compiled as compiled_module
from metasd_langchain.constraints.closing import Closer
from metasd_langchain.constraints.compiled import check, compiled
from metasd_langchain.constraints.legal import FEW, Legal
from metasd_langchain.constraints.vocabulary import ll_tokenizer, token_bytes
from metasd_langchain.engine.guide import Guide
from metasd_langchain.errors import BadGrammar, BadOption, CapTooSmall, ConstraintFailed, MissingExtra
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.testing.schemas import random_schema
from metasd_langchain.values import Draft
from tests.bugs.kit import PROMPT, TOKENIZER, every_way, ids, make

VOCAB, EOS = 512, 1
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model(), tiny_tokenizer()))


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text_of(tokens: Any) -> str:
    return str(TOKENIZER.decode(list(tokens)))


# -- grammars ----------------------------------------------------------------------------------------------------------


def test_a_grammar_is_a_value() -> None:
    grammar = json_schema(NAME)
    assert grammar == json_schema(json.loads(json.dumps(NAME)))
    assert {grammar: 1}[pickle.loads(pickle.dumps(grammar))] == 1  # noqa: S301
    assert json.loads(json.dumps([grammar.lark, grammar.label])) == [grammar.lark, "response_format"]


def test_neither_llguidance_nor_torch_is_loaded_by_importing_grammars() -> None:
    code = (
        "import sys, metasd_langchain.constraints.compiled, metasd_langchain.options as o; "
        "o.Options(choices=['a']).wanted_grammar(); print({'llguidance', 'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("a/b", "a/b", "ab"),
        (r"a\/b", "a/b", r"a\/b"),
        ("a\nb", "a\nb", "a b"),
        (r"a\\/", "a\\/", "a/"),
        ("[/]x", "/x", "x"),
        ('"q"', '"q"', "q"),
        ("é+", "éé", "e"),
        ("a b", "a b", "ab"),
        (r"\d{2}", "07", "7"),
        ("a|bc", "bc", "ac"),
    ],
)
def test_a_regular_expression_means_what_it_says(target: Target, pattern: str, right: str, wrong: str) -> None:
    session = compiled(regex(pattern), target).open(frozenset({EOS}))
    assert complete(session, encode(right))
    assert not complete(session, encode(wrong))


def complete(session: Any, tokens: list[int]) -> bool:
    """Whether the tokens are legal one after another and may be all."""
    for place, token in enumerate(tokens):
        if token not in session.legal(tokens[:place]):
            return False
    return session.ended(tokens) or EOS in session.legal(tokens)


def test_choices_are_these_strings_and_no_other(target: Target) -> None:
    options = ["yes", "yes, sir", 'say "no"', "a\nb", "naïve 日本", "/x/"]
    session = compiled(choice(options), target).open(frozenset({EOS}))
    for option in options:
        assert complete(session, encode(option))
    for wrong in ("ye", "yes,", "no", "say no", "a b", "yes, sir."):
        assert not complete(session, encode(wrong))


@pytest.mark.parametrize("text", ["<eos>x", "x<eos>", "<bos>", "<pad><unk>", "<unused3>"])
def test_text_that_looks_like_a_control_token_is_text(text: str) -> None:
    """llguidance's own reading of a tokenizer forces the control token, which ends the answer or vanishes from it."""
    assert make(choices=[text]).invoke(PROMPT) == text
    assert make(response_format={"const": text}).invoke(PROMPT) == json.dumps(text)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: choice([]),
        lambda: choice("yes"),
        lambda: choice([""]),
        lambda: choice([1]),  # type: ignore[list-item]
        lambda: regex(""),
        lambda: lark("  "),
        lambda: lark(3),  # type: ignore[arg-type]
        lambda: json_schema([1]),  # type: ignore[arg-type]
        lambda: json_schema({"const": {1, 2}}),
        lambda: json_schema({"minimum": float("nan")}),
    ],
)
def test_what_can_be_no_grammar_is_refused(wrong: Any) -> None:
    with pytest.raises(BadOption):
        wrong()


def test_a_schema_cannot_turn_free_whitespace_on(target: Target) -> None:
    grammar = json_schema({**NAME, "x-guidance": {"whitespace_flexible": True}})
    session = compiled(grammar, target).open(frozenset({EOS}))
    assert complete(session, encode('{"name": "x"}'))
    assert not complete(session, encode('{ "name": "x"}'))


def test_a_schema_stands_in_a_grammar_of_ones_own(target: Target) -> None:
    grammar = lark(f'start: "<call>" args "</call>"\nargs: {json_rule(NAME)}')
    session = compiled(grammar, target).open()
    assert complete(session, encode('<call>{"name": "x</call>"}</call>'))
    assert not complete(session, encode('<call>{"name": 1}</call>'))


# -- options -----------------------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str


class Typed(TypedDict):
    name: str


def test_every_shape_of_a_response_format_is_the_same_grammar() -> None:
    wanted = json_schema(NAME)
    shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": NAME, "strict": True}}
    assert make(response_format=NAME).wanted_grammar() == wanted
    assert make(response_format=shaped).wanted_grammar() == wanted
    assert make(response_format={"type": "text"}).wanted_grammar() is None
    assert make(response_format={"type": "json_object"}).wanted_grammar() == json_schema({"type": "object"})
    for kind in (Person, Typed):
        llm = make(response_format=kind)
        json.dumps(llm.response_format)  # as JSON, in the constructor as in a call
        assert make()._bound({"response_format": kind})[0].response_format == llm.response_format
        assert json.loads(llm.invoke(PROMPT, max_tokens=40)).keys() == {"name"}


def test_at_most_one_constraint() -> None:
    with pytest.raises(BadOption, match=r"regex.*response_format"):
        make(response_format=NAME, regex="a")
    with pytest.raises(BadOption, match="choices"):
        make(regex="a").invoke(PROMPT, choices=["a"])
    assert make(regex="a").invoke(PROMPT, regex=None, choices=["b"]) == "b"


def test_a_grammar_object_is_taken_as_its_text() -> None:
    llm = make(grammar=lark('start: "ab" | "cd"'))
    assert llm.grammar == 'start: "ab" | "cd"'
    assert llm.invoke(PROMPT) in ("ab", "cd")


def test_constraints_keep_cached_answers_apart() -> None:
    llm = make(cache=InMemoryCache())
    free = llm.invoke(PROMPT)
    answers = {llm.invoke(PROMPT, choices=[word]) for word in ("one", "two")} | {llm.invoke(PROMPT, regex="t[h]ree")}
    assert answers == {"one", "two", "three"}
    assert llm.invoke(PROMPT) == free
    assert llm.invoke(PROMPT, choices=["two"]) == "two"


async def test_every_way_of_asking_gives_the_same_constrained_answer() -> None:
    for options in ({"response_format": NAME}, {"regex": "[a-f]{3,6}-[0-9]{2}"}, {"choices": ["alpha", "alpine", "b"]}):
        for temperature in (0.0, 1.0):
            llm = make(max_tokens=40, temperature=temperature, seed=5, **options)
            answers = await every_way(llm)
            assert len(set(map(str, answers.values()))) == 1
            assert answers["invoke"].finish_reason == "stop"
            assert ids(llm) == ids(llm, speculative=False)


def test_a_pickled_object_still_constrains() -> None:
    llm = make(choices=["alpha", "beta"])
    assert pickle.loads(pickle.dumps(llm)).choices == ["alpha", "beta"]  # noqa: S301


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"response_format": {"type": "sonnet"}}, r"response_format.*sonnet"),
        ({"response_format": {"type": "object", "if": {}}}, r'response_format.*"if"'),
        ({"response_format": {"$ref": "#/$defs/none"}}, r"response_format"),
        ({"response_format": {"type": "string", "format": "poem"}}, r"response_format.*poem"),
        ({"regex": "(?=a)b"}, r"regex.*look-around"),
        ({"regex": "a("}, r"regex.*unclosed"),
        ({"grammar": "start: nothing"}, r"grammar.*nothing"),
        ({"grammar": "begin: /a/"}, r"grammar.*start"),
    ],
)
def test_what_cannot_be_compiled_is_named_with_the_reason_and_the_next_call_works(options: Any, said: str) -> None:
    llm = make()
    before = llm.invoke(PROMPT)
    with pytest.raises(BadGrammar, match=said) as raised:
        make(**options)  # before anything is loaded
    with pytest.raises(BadGrammar, match=said):
        llm.invoke(PROMPT, **options)
    assert raised.value.option == next(iter(options))
    assert "\n" not in str(raised.value)
    assert llm.invoke(PROMPT) == before
    assert llm.invoke(PROMPT, choices=["ok"]) == "ok"


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find(name))
    with pytest.raises(MissingExtra, match=r"metasd-langchain\[grammar\]"):
        make(choices=["never seen before"])
    assert make().invoke(PROMPT)  # nothing else needs it


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    slow: Any = type("Slow", (), {"eos_token_id": 1})()
    stub: Any = type("Stub", (), {"tokenizer": slow, "stop_ids": {1}, "lock": threading.Lock()})()
    with pytest.raises(BadGrammar, match="Slow"):
        ll_tokenizer(stub)


def test_a_cap_too_small_for_the_schema_names_both_numbers() -> None:
    llm = make(response_format=NAME)
    with pytest.raises(CapTooSmall, match=r"has \d+ tokens, and 4 may") as raised:
        llm.invoke(PROMPT, max_tokens=4)
    assert raised.value.cap == 4
    assert json.loads(llm.invoke(PROMPT, max_tokens=raised.value.shortest)) == {"name": ""}


def test_an_answer_of_another_grammar_is_an_error_and_the_session_goes_on(target: Target) -> None:
    session = compiled(choice(["ab", "cd"]), target).open()
    with pytest.raises(ConstraintFailed):
        session.legal(encode("x"))
    assert encode("a")[0] in session.legal([])
    with pytest.raises(ConstraintFailed):
        session.legal([10**6])
    assert encode("c")[0] in session.legal([])


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_old_ones_are_let_go(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "_GRAMMARS", 3)
    first = compiled(choice(["a"]), target)
    assert compiled(choice(["a"]), target) is first
    for i in range(3):
        compiled(choice([f"b{i}"]), target)
    assert compiled(choice(["a"]), target) is not first


def test_many_threads_compile_at_once(target: Target) -> None:
    found: list[Any] = []
    grammars = [choice([f"thread {i % 3}"]) for i in range(12)]
    threads = [threading.Thread(target=lambda g=g: found.append(compiled(g, target))) for g in grammars]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(constraint) for constraint in found}) == 3


def byte_level() -> Any:
    """A tokenizer as GPT-2's: bytes as characters, one special and one ordinary added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "Ġt", "he", "Ã©"])}
    raw = Tokenizer(tokenizer_models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ã", "©")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")  # noqa: S106
    fast.add_tokens(["été\n"])
    return fast


@pytest.mark.parametrize("make_tokenizer", [tiny_tokenizer, byte_level])
def test_bytes_of_tokens_are_those_llguidance_would_find_itself(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    theirs = llguidance.hf.from_tokenizer(tokenizer)
    stub: Any = type("Stub", (), {"tokenizer": tokenizer, "stop_ids": {1}, "lock": threading.Lock()})()
    built = ll_tokenizer(stub)
    assert token_bytes(tokenizer.backend_tokenizer) is not None  # so this is not the same twice
    special = set(tokenizer.all_special_ids)
    assert built.vocab_size == theirs.vocab_size
    for token in set(range(built.vocab_size)) - special:
        assert built.decode_bytes([token]) == theirs.decode_bytes([token])
        assert built.is_special_token(token) == theirs.is_special_token(token)
    assert built.tokenize_str("thé the\n") == theirs.tokenize_str("thé the\n")
    grammar = json_schema(NAME).lark
    ours, other = LLMatcher(built, grammar), LLMatcher(theirs, grammar)
    for _ in range(12):
        assert ours.compute_ff_tokens() == other.compute_ff_tokens()
        legal = np.flatnonzero(np.unpackbits(np.frombuffer(ours.compute_bitmask(), np.uint8), bitorder="little"))
        token = int(legal[len(legal) // 2])
        assert ours.consume_token(token)
        assert other.consume_token(token)


def test_a_tokenizer_without_eos_is_served() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    model = tiny_model()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    target = load_target((model, tokenizer))
    assert target.stop_ids == frozenset()
    session = compiled(regex("[ab]{2}!?"), target).open()
    assert members(session.legal(encode("ab"))) == members(Legal.of([encode("!")[0], 4 + ord("!")], VOCAB))
    assert session.ended(encode("ab!"))


def test_a_decoder_that_is_not_known_is_left_to_llguidance() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    assert token_bytes(tokenizer.backend_tokenizer) is None


# -- sets of tokens ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 700).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n + 70), max_size=200))))
def test_legal_tokens_are_a_set(given_: tuple[int, set[int]]) -> None:
    vocab, tokens = given_
    inside = {token for token in tokens if token < vocab}
    bits = np.zeros(800, dtype=np.uint8)
    bits[list(tokens)] = 1
    for legal in (Legal.of(sorted(tokens), vocab), Legal(np.packbits(bits, bitorder="little").tobytes(), vocab)):
        assert {token for token in range(-5, vocab + 80) if token in legal} == inside
        assert bool(legal) == bool(inside)
        assert (None if legal.few is None else legal.few.tolist()) == (sorted(inside) if len(inside) <= FEW else None)
        logits = torch.randn(vocab)
        masked = legal.masked(logits)
        assert {i for i, value in enumerate(masked.tolist()) if value != -torch.inf} == inside
        assert all(masked[i] == logits[i] for i in inside)
        changed = legal.changed(drop=sorted(tokens)[:3], add=(0, vocab + 9))
        assert {token for token in range(vocab) if token in changed} == inside - set(sorted(tokens)[:3]) | {0}
        assert {token for token in range(vocab) if token in legal} == inside


# -- sessions ----------------------------------------------------------------------------------------------------------


def members(legal: Legal) -> frozenset[int]:
    return frozenset(token for token in range(VOCAB) if token in legal)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_session_says_depends_on_the_answer_alone(target: Target, seed: int) -> None:
    """A session that is sent to and fro says the same as a new one at each place."""
    rng = random.Random(seed)
    constraint = compiled(json_schema(random_schema(seed)), target)
    answer: list[int] = []
    wandering = constraint.open(frozenset({EOS}), 200)
    places = [tuple(answer)]
    while len(answer) < 60 and not wandering.ended(answer):
        tokens = sorted(members(wandering.legal(answer)) - {EOS})
        answer.append(rng.choice(tokens))
        places.append(tuple(answer))
        back = rng.choice(places)  # another branch, then back
        for _ in range(4):
            if wandering.ended(back):
                break
            token = rng.choice(sorted(members(wandering.legal(back)) - {EOS}))
            wandering.allows(back, token)
            wandering.closing(back)
            wandering.pruned(back, Draft.chain([rng.randrange(VOCAB + 9) for _ in range(4)]))
            back = (*back, token)
        fresh = constraint.open(frozenset({EOS}), 200)
        assert wandering.ended(answer) == fresh.ended(answer)
        if not fresh.ended(answer):
            assert members(wandering.legal(answer)) == members(fresh.legal(answer))
            assert wandering.forced(answer, 99) == fresh.forced(answer, 99)
            assert wandering.closing(answer) == fresh.closing(answer)
            some = rng.sample(range(VOCAB), 5)
            allowed = [token for token in some if token in fresh.legal(answer)]
            assert [wandering.allows(answer, token) for token in allowed] == [
                constraint.open(frozenset({EOS}), 200).allows(answer, token) for token in allowed
            ]


def test_forced_tokens_are_the_only_legal_ones(target: Target) -> None:
    session = compiled(json_schema(NAME), target).open(frozenset({EOS}))
    answer: list[int] = []
    for token in session.forced([], 99):
        assert members(session.legal(answer)) == {token}
        answer.append(token)
    assert text_of(answer) == '{"name": "'
    assert session.forced([], 3) == tuple(answer[:3])


def test_stop_ids_are_legal_where_the_grammar_may_end_and_nowhere_else(target: Target) -> None:
    constraint = compiled(regex("a+b?"), target)
    a, b = encode("a")[0], encode("b")[0]
    session = constraint.open(frozenset({EOS, 9, b}))  # b is text, too, but a stop id is no text
    assert {EOS, 9, b} & members(session.legal([])) == set()
    assert {EOS, 9, b} <= members(session.legal([a]))
    assert members(constraint.open().legal([a])) & {EOS, 9} == set()  # an EOS that ends nothing is not legal
    assert session.allows([a], 9)


@pytest.mark.parametrize("seed", range(4))
def test_pruning_leaves_exactly_the_legal_nodes(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    constraint: Any = compiled(regex("([ab]c?){1,6}"), target)
    session = constraint.open(frozenset({EOS}))
    pieces = [encode(c)[0] for c in "abc"]
    for _ in range(30):
        size = rng.randrange(1, 9)
        parents = tuple(rng.randrange(-1, node) for node in range(size))
        tree = Draft(tuple(rng.choice([*pieces, 5, VOCAB + 3]) for _ in range(size)), parents)
        chain = Draft.chain([rng.choice([*pieces, pieces[0]]) for _ in range(size)])
        for draft in (tree, chain):
            kept: list[int] = []
            paths: dict[int, list[int]] = {-1: []}
            for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
                if parent in paths and constraint.matcher().consume_tokens([*paths[parent], token]):
                    paths[node] = [*paths[parent], token]
                    kept.append(node)
            assert session.pruned([], draft) == draft.only(kept)


def test_a_draft_behind_forced_tokens_keeps_its_shape_and_distributions(target: Target) -> None:
    session = compiled(json_schema(NAME), target).open(frozenset({EOS}))
    guide = Guide(session, VOCAB, forces=True)
    forced = guide.forced([], 4)
    q = torch.rand(3, VOCAB).softmax(-1)
    draft = guide.hung([], forced, Draft((5, 6, 7), (-1, -1, 1), q), prune=False)
    assert draft.tokens == (*forced, 5, 6, 7)
    assert draft.parents == (-1, 0, 1, 2, 3, 3, 5)
    assert draft.q is not None
    assert torch.equal(draft.q[4:], q)
    assert [int(row.argmax()) for row in draft.q[:4]] == list(forced)
    assert draft.q[:4].sum() == 4
    assert Guide(session, VOCAB, forces=False).forced([], 4) == ()


# -- the way to the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "shortest"),
    [
        (choice(["yes", "absolutely not"]), "yes"),
        (regex("x{7}"), "xxxxxxx"),
        (regex("(ab)*c"), "c"),
        (regex("[a-z]+@[a-z]+[.]org"), "q@q.org"),
        (json_schema(NAME), '{"name": ""}'),
        (json_schema({"type": "object"}), "{}"),
        (json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3}), "[0, 0, 0]"),
        (json_schema({"type": "string", "minLength": 4}), '"aaaa"'),
        (json_schema({"type": "integer", "minimum": 1000}), "1000"),
        (json_schema({"anyOf": [{"const": "a long constant"}, {"type": "null"}]}), "null"),
        (
            json_schema({"type": "object", "properties": {"a": NAME, "b": NAME}, "required": ["a"]}),
            '{"a": {"name": ""}}',
        ),
        (lark('start: "(" start ")" | "x"'), "x"),
        (lark("start: /(.|\\n)*/"), ""),
    ],
)
def test_the_shortest_answer_is_found(target: Target, grammar: Grammar, shortest: str) -> None:
    constraint: Any = compiled(grammar, target)
    assert constraint.shortest() == len(encode(shortest))
    if constraint.way:
        assert complete(constraint.open(frozenset({EOS})), list(constraint.way))


def test_a_way_is_found_from_anywhere_in_random_answers(target: Target) -> None:
    closer_of: dict[int, Closer] = {}
    for seed in range(25):
        constraint: Any = compiled(json_schema(random_schema(seed)), target)
        closer = closer_of.setdefault(0, constraint.closer)
        matcher, rng = constraint.matcher(), random.Random(seed)
        for _ in range(25):
            if matcher.is_stopped():
                break
            way = closer.quick(matcher)
            assert way is not None
            assert closer.fits(matcher, way)
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
            token = int(rng.choice(np.flatnonzero(bits).tolist()))
            if token == EOS:
                break
            assert matcher.consume_token(token)


def test_a_token_is_refused_exactly_when_no_room_is_left_behind_it(target: Target) -> None:
    constraint = compiled(json_schema({"type": "array", "items": {"const": 1}}), target)  # [1, 1, ...]
    opened, one, comma, close = (encode(c)[0] for c in "[1,]")
    answer = [opened, one]
    for cap, fits in ((3, False), (5, False), (6, True)):  # a comma, a space and a 1 come before the bracket again
        session = constraint.open(frozenset({EOS}), cap)
        assert {comma, close} <= members(session.legal(answer))
        assert session.allows(answer, comma) is fits
        assert session.allows(answer, close)
        assert session.closing(answer) == (close,)
    assert constraint.open(frozenset({EOS})).allows(answer, comma)


# -- what of JSON schema is served -------------------------------------------------------------------------------------

SERVED: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["a", 1, None, True, 2.5]},
    "const": {"const": "x y"},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "nullable": {"type": ["string", "null"], "maxLength": 3},
    "$defs": {"$defs": {"a": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 2},
    "recursion": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "pattern": {"type": "string", "pattern": "^[a-z]{2}[0-9]{2}$"},
    "bounds": {"type": "number", "minimum": -2, "exclusiveMaximum": 3},
    "lengths": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "multipleOf": {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": 7},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
    "format": {"type": "string", "format": "date"},
}


@pytest.mark.parametrize("name", SERVED)
def test_keywords_that_are_served(name: str) -> None:
    for temperature in (0.0, 1.0):
        text = make(response_format=SERVED[name], max_tokens=40, temperature=temperature, seed=2).invoke(PROMPT)
        jsonschema.validate(json.loads(text), SERVED[name])


@pytest.mark.parametrize("keyword", ["if", "not", "uniqueItems", "dependentRequired", "contains", "propertyNames"])
def test_keywords_that_are_not_served_are_named(keyword: str) -> None:
    value = {"uniqueItems": True, "dependentRequired": {"a": ["b"]}}.get(keyword, {"type": "string"})
    with pytest.raises(BadGrammar, match=keyword):
        check(json_schema({"type": "array" if keyword in ("uniqueItems", "contains") else "object", keyword: value}))


# -- beside other options ----------------------------------------------------------------------------------------------


def ban_everything(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 30},
        {"no_repeat_ngram_size": 1},
        {"logit_bias": dict.fromkeys(range(4, 512), -100.0)},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"logits_processors": [ban_everything]},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_other_options_forbid_every_legal_token_the_grammar_wins(options: Any, temperature: float) -> None:
    llm = make(regex="[abc]{4}x?", temperature=temperature, seed=1, **options)
    answer = llm.invoke(PROMPT)
    assert len(answer) in (4, 5)
    assert set(answer[:4]) <= set("abc")
    assert ids(llm) == ids(llm, speculative=False) == ids(llm, drafters=["suffix@8"], policy="fixed")


def test_penalties_and_bias_choose_among_legal_tokens() -> None:
    both = [encode("b")[0], TOKENIZER.convert_tokens_to_ids("<0x62>")]  # b, and b as a byte
    assert make(regex="[abc]{4}", logit_bias=dict.fromkeys(both, 50.0)).invoke(PROMPT) == "bbbb"
    assert set(make(regex="[ab]{4}", logit_bias=dict.fromkeys(both, -50.0)).invoke(PROMPT)) == {"a"}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    llm = make(choices=["ab", "cd"], logprobs=2)
    result = llm.generate([PROMPT]).generations[0][0]
    content = result.generation_info["logprobs"]["content"]
    free = make(max_tokens=1, logprobs=2).generate([PROMPT]).generations[0][0].generation_info["logprobs"]["content"]
    assert content[0]["top_logprobs"] == free[0]["top_logprobs"]  # of the same row, what is legal there or not


def test_n_answers_a_deadline_and_a_stop_string_work_beside_a_grammar() -> None:
    llm = make(regex="[abc]{6}", temperature=1.5, seed=3, n=3, timeout=60)
    answers = [generation.text for generation in llm.generate([PROMPT]).generations[0]]
    assert len(set(answers)) > 1
    assert all(len(answer) == 6 for answer in answers)
    assert make(regex="a+bc", logit_bias={encode("b")[0]: 50.0}).invoke(PROMPT, stop=["b"]).strip("a") == ""
