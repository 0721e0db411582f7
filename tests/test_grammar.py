"""Grammars: what they read, what they allow, and texts from random logits for others to parse."""

import ast
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_model import CONTROL, END, TEXTS, StubModel, allows, matcher

from llamagraph.errors import LlamaGraphError
from llamagraph.text.gbnf import parse_grammar
from llamagraph.text.matcher import DEAD, Constraint, Matcher
from llamagraph.text.nodes import utf8_ranges
from llamagraph.text.trie import TokenTrie

N = 200

ARITHMETIC = r"""
root   ::= term (op term)*
term   ::= number | "(" root ")"
op     ::= " "? [-+*/] " "?
number ::= "0" | [1-9] [0-9]{0,4}
"""
JSON = r"""
root    ::= object | array   # with space where a reader would have it
value   ::= object | array | string | number | "true" | "false" | "null"
object  ::= "{" space ( pair ("," space pair)* )? "}"
pair    ::= string ":" space value
array   ::= "[" space ( value ("," space value)* )? "]"
string  ::= "\"" ( [^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-cA-C] [0-9a-fA-F]{3}) )* "\""
number  ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,9})? ([eE] [-+]? [0-9]{1,2})?
space   ::= | " " | "\n" [ \t]{0,8}
"""
C_LIKE = r"""
root      ::= function+
function  ::= "int " name "(" ("int " name (", int " name)*)? ") " block "\n"
block     ::= "{\n" statement* "}"
statement ::= ( "int " name " = " expr ";" |
                name " = " expr ";" |
                "while (" expr ") " block |
                "if (" expr ") " block (" else " block)? |
                "return " expr ";" ) "\n"
expr      ::= atom (" " ("+" | "-" | "*" | "/" | "<" | "==" | "&&") " " atom)*
atom      ::= name | [0-9]{1,4} | "-" atom | "(" expr ")" | name "(" (expr (", " expr)*)? ")"
name      ::= [a-z_] [a-z0-9_]{0,6}
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+ "\n" ("  * " [a-z]{1,8} "\n"){0,2}
"""
CHESS = r"""
root   ::= ("1. " move " " move "\n") ([1-9] [0-9]? ". " move " " move "\n")*
move   ::= (pawn | piece | castle) [+#]?
piece  ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBQR])?
castle ::= "O-O" "-O"?
"""
JAPANESE = r"""
root     ::= sentence{1,4}
sentence ::= (noun particle){1,3} verb "。" "\n"?
noun     ::= "私" | "猫" | "日本" | "東京" | [ァ-ヴ]{2,5} | kanji kanji?
kanji    ::= [\u4E00-\u9FA5]
particle ::= "は" | "が" | "を" | "に" | "で"
verb     ::= kanji? [\u3041-\u3096]{1,3} ("ます" | "ました" | "ません")
"""


def check_arithmetic(text):
    allowed = (ast.Expression, ast.BinOp, ast.operator, ast.Constant)
    assert all(isinstance(node, allowed) for node in ast.walk(ast.parse(text, mode="eval")))


class CReader:
    """A reader of the C-like language, over its words."""

    def __init__(self, text):
        self.words = re.findall(r"[a-z_][a-z0-9_]*|\d+|==|&&|[-+*/<={}();,]", text)
        assert re.sub(r"\s", "", text) == "".join(self.words)

    def take(self, *expected):
        word = self.words.pop(0)
        assert not expected or word in expected, (word, expected)
        return word

    def name(self):
        assert re.fullmatch(r"[a-z_]\w*", self.take())

    def many(self, read):
        if self.words[0] != ")":
            read()
            while self.words[0] == ",":
                self.take(",")
                read()
        self.take(")")

    def program(self):
        while self.words:
            self.take("int"), self.name(), self.take("(")
            self.many(lambda: (self.take("int"), self.name()))
            self.block()

    def block(self):
        self.take("{")
        while self.words[0] != "}":
            self.statement()
        self.take("}")

    def statement(self):
        word, after = self.words[0], self.words[1]
        if word in ("while", "if") and after == "(":
            self.take(), self.take("("), self.expression(), self.take(")"), self.block()
            if word == "if" and self.words[0] == "else" and self.words[1] == "{":
                self.take(), self.block()
            return
        if word == "return" and after != "=":
            self.take()
        else:
            if word == "int" and after != "=":
                self.take()
            self.name(), self.take("=")
        self.expression(), self.take(";")

    def expression(self):
        self.atom()
        while self.words[0] in ("+", "-", "*", "/", "<", "==", "&&"):
            self.take(), self.atom()

    def atom(self):
        word = self.take()
        if word == "-":
            self.atom()
        elif word == "(":
            self.expression(), self.take(")")
        elif not word.isdigit():
            assert re.fullmatch(r"[a-z_]\w*", word)
            if self.words[0] == "(":
                self.take("("), self.many(self.expression)


def check_list(text):
    assert text.endswith("\n")
    stars = 0
    for line in text.removesuffix("\n").split("\n"):
        stars = stars + 1 if line.startswith("  * ") else 0
        assert stars <= 2 and (line[4:].isalpha() if stars else line[:2] == "- " and len(line) > 2)


def check_chess(text):
    square = "[a-h][1-8]"
    move = rf"(?:(?:[a-h]x)?{square}(?:=[NBQR])?|[NBKQR][a-h]?[1-8]?x?{square}|O-O(?:-O)?)[+#]?"
    lines = text.splitlines()
    assert lines[0].startswith("1. ")
    assert all(re.fullmatch(rf"[1-9]\d?\. {move} {move}", line) for line in lines)


def check_japanese(text):
    noun = "(?:私|猫|日本|東京|[ァ-ヴ]{2,5}|[一-龥]{1,2})"
    verb = "[一-龥]?[ぁ-ゖ]{1,3}ま(?:す|した|せん)"
    for sentence in text.replace("\n", "").split("。")[:-1]:
        assert re.fullmatch(rf"(?:{noun}[はがをにで]){{1,3}}{verb}", sentence)
    assert text.rstrip("\n").endswith("。")


@pytest.mark.parametrize("grammar, check, toward, away", [
    (ARITHMETIC, check_arithmetic, "0123456789)", "(+-*/"),
    (JSON, json.loads, "\"]}0", "[{,"),
    (C_LIKE, lambda text: CReader(text).program(), "});\n", "({+-*/<=&,"),
    (LIST, check_list, "\n", ""),
    (CHESS, check_chess, "", ""),
    (JAPANESE, check_japanese, "。", ""),
], ids=["arithmetic", "json", "c", "list", "chess", "japanese"])
def test_what_random_logits_write_is_read_by_another_parser(grammar, check, toward, away):
    m, stub = matcher(grammar), StubModel(1, toward, away)
    texts = [stub.generate(m) for _ in range(N)]
    for text in texts:
        check(text)
    assert len(set(texts)) > N / 2


def test_the_mask_is_what_single_tokens_say():
    for grammar in (ARITHMETIC, JSON, C_LIKE, LIST, JAPANESE):
        m, rng = matcher(grammar), np.random.default_rng(2)
        state = m.start
        for _ in range(30):
            mask = m.mask(state)
            assert [m.accepts(state, token) for token in range(len(TEXTS))] == mask.tolist()
            allowed = np.flatnonzero(mask[:CONTROL])
            if not len(allowed):
                break
            state = m.advance(state, int(rng.choice(allowed)))


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.lists(st.characters(
    exclude_categories=["Cs"]), max_size=20))
def test_byte_ranges_are_the_characters_between(a, b, chars):
    low, high = min(a, b), max(a, b)
    edges = [chr(c) for c in (low, high, low - 1, high + 1)
             if 0 <= c <= 0x10FFFF and not 0xD800 <= c <= 0xDFFF]
    sequences = utf8_ranges(low, high)
    for char in [*chars, *edges]:
        code = char.encode()
        found = [s for s in sequences if len(s) == len(code) and all(
            first <= byte <= last for byte, (first, last) in zip(code, s, strict=True))]
        assert len(found) == (low <= ord(char) <= high)


def test_a_token_may_end_inside_of_a_character():
    m = matcher('root ::= [ぁ-ん]{2} | "é"')
    a = "あ".encode()
    assert allows(m, a + a) and allows(m, "é") and not allows(m, a)
    half = m.advance(m.start, a[0])
    assert half and not m.may_end(half) and not m.accepts(half, END)
    assert [b for b in range(256) if m.accepts(half, b)] == [0x81, 0x82]
    assert not m.accepts(m.start, 0xFF) and not m.accepts(m.start, a[1])


def test_halves_of_surrogates_and_nul_never_come():
    m = matcher("root ::= .*")
    assert allows(m, "a\n\U0001F408") and not allows(m, b"\xed\xa0\x80") and not allows(m, b"\0")


@pytest.mark.parametrize("grammar, yes, no", [
    ('root ::= "ab"{2}', ["abab"], ["ab", "ababab"]),
    ('root ::= "a"{2,}', ["aa", "a" * 500], ["a"]),
    ('root ::= "a"{1,3}', ["a", "aaa"], ["", "aaaa"]),
    ('root ::= "a"{ 0 , 2 }"b"', ["b", "aab"], ["aaab"]),
    ('root ::= ("a"?){3} "b"+', ["b", "aaab"], ["aaaab", "a"]),
    ('root ::= ("a"*)* "b"', ["b", "aaab"], [""]),
    ('root ::= "a" | | "b"', ["", "a", "b"], ["ab"]),
    ('root ::= (\n "a" # one\n | "b"\n)\n', ["a", "b"], [""]),
    ('root ::= "a" |\n  "b"\nother ::= "c"', ["a", "b"], ["c"]),
    ("# first\nroot ::=\n x-1 X_2\nx-1 ::= [0-9]\r\nX_2 ::= [a-]", ["1a", "1-"], ["a1", "1b"]),
    (r'root ::= "\x41\u3042\U0001F408\t\"\\\[\]\-"', ['Aあ\U0001F408\t"\\[]-'], ["A"]),
    (r'root ::= [^a-c\n]', ["d", "é", "日"], ["a", "b", "\n", "", "dd"]),
    (r'root ::= [\]\-x]', ["]", "-", "x"], ["\\"]),
    ('root ::= ""* "x"', ["x"], [""]),
    ('root ::= "("root?")"', ["()", "((()))"], ["(", "(()"]),
    ('root ::= "a"{0} "b"', ["b"], ["ab"]),
    ('root ::= "x"\nroot ::= "y"', ["y"], ["x"]),
])
def test_what_the_notation_means(grammar, yes, no):
    m = matcher(grammar)
    assert all(allows(m, text) for text in yes)
    assert not any(allows(m, text) for text in no)


@pytest.mark.parametrize("grammar, said", [
    ("", "grammar: there is no rule root"),
    ('main ::= "a"', "there is no rule root"),
    ('root ::= "a', 'grammar:1:10: this is never closed: "a'),
    ("root ::= [a", "1:10: this is never closed: [a"),
    ('root ::= ("a"', "1:10: this parenthesis is never closed"),
    ('root ::= "a")', "1:13: ')' does not fit here"),
    ("root ::= []", "1:10: an empty class"),
    ("root ::= [z-a]", "1:10: 'z' to 'a' is no range"),
    ('root ::= "a"{3,2}', "1:13: {3,2} is no range"),
    ('root ::= "a"{x}', "1:13: a number of times is written"),
    ("root ::= *", "1:10: nothing stands before *"),
    (r'root ::= "\q"', r"1:11: unknown escape \q; there are \n"),
    (r'root ::= "\u12"', r"1:11: unknown escape \u12"),
    (r'root ::= "\UFFFFFFFF"', r"1:11: unknown escape \UFFFFFFFF"),
    (r'root ::= "\uD800"', "1:11: half of a surrogate pair"),
    ('root ::= "a"\n\nroot ; "b"', "3:6: ::= was expected after root"),
    ("root ::= a b\na ::= [x]", "1:12: there is no rule b"),
    ('root ::= root "a" | "b"', "1:10: rule root begins with itself (root -> root)"),
    ('root ::= a\na ::= b? c\nb ::= "x"\nc ::= a', "rule a begins with itself (a -> c -> a)"),
    ("root ::= <nothing>", "1:10: <nothing> is not one token"),
    ("root ::= <[99999]>", "there is no token <[99999]>"),
    (f"root ::= <[{END}]>", "ends the text"),
    ("root ::= ! x", "1:10: a token is written <[id]>"),
    ("(" * 5, "1:1: a rule was expected, not '('"),
    ("root ::= " + "(" * 500, "more than 100 parentheses"),
    ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(300)) + '\nr300 ::= "a"',
     "more than 200 rules and parentheses begin with one another"),
    ("root ::= r0\n" + "\n".join(f"r{i} ::= {'(' * 9}r{i + 1}{')' * 9}" for i in range(40))
     + '\nr40 ::= "a"', "more than 200 rules and parentheses begin with one another"),
    ('root ::= [\\uD800-\\uDFFF] "a"', "the grammar allows no text at all"),
    ('root ::= "a"\n  $', "2:3: a rule was expected"),
])
def test_mistakes_are_named_with_their_place(grammar, said):
    with pytest.raises(LlamaGraphError) as caught:
        matcher(grammar)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_tokens_can_be_named():
    m = matcher(f'root ::= <think> !<think>* <[{CONTROL}]> "ok"')
    state = m.advance(m.start, CONTROL)
    assert m.mask(m.start).nonzero()[0].tolist() == [CONTROL] and state != DEAD
    assert m.mask(state).sum() == len(TEXTS) - 1 and not m.accepts(state, END)
    for token in (*b"any \xff", CONTROL, *b"ok", END):
        assert m.accepts(state, token)
        state = m.advance(state, token)
    assert not matcher("root ::= .").accepts(1, CONTROL)  # it shows nothing, so it is no character


def test_it_ends_only_where_the_grammar_does():
    m = matcher('root ::= "a"+')
    assert not m.accepts(m.start, END)
    after = m.advance(m.start, ord("a"))
    assert m.advance(after, END) == after and m.mask(after)[END]
    once = matcher('root ::= "a"')
    assert once.mask(once.advance(once.start, ord("a"))).nonzero()[0].tolist() == [END]


def test_a_constraint_counts_and_refuses():
    c = Constraint(matcher('root ::= "ab"'))
    logits = np.zeros(len(TEXTS), np.float32)
    assert c.accepts(ord("a")) and not c.accepts(ord("b"))
    assert np.flatnonzero(np.isfinite(c.masked(logits))).tolist() == [ord("a")]
    with pytest.raises(LlamaGraphError, match="forbidden by a bias"):
        c.advance(ord("b"))
    c.advance(ord("a"))
    assert (c.n_tokens, c.n_rejected) == (1, 1) and c.seconds > 0
    poor = TokenTrie([b"a", b""], np.ones(2, bool), {1})
    stuck = Constraint(Matcher(parse_grammar('root ::= "ab"'), poor))
    stuck.advance(0)
    with pytest.raises(LlamaGraphError, match="no token of this model goes on"):
        stuck.masked(np.zeros(2, np.float32))


def test_too_many_ways_to_read_are_refused():
    ways = "\n".join(f'a{i} ::= "x" a{i + 1} "{i}" | "x" a{i + 1} "y"' for i in range(20))
    m = matcher(f'root ::= a0\n{ways}\na20 ::= "z"')
    with pytest.raises(LlamaGraphError, match="in more than 4096 ways"):
        allows(m, "x" * 20)


@given(st.text(alphabet='root:= "ab[]()|*+?{1,2}.<>!#\\\n^-', max_size=40))
def test_any_text_is_a_grammar_or_one_line(text):
    try:
        parse_grammar("root ::= " + text)
    except LlamaGraphError as error:
        assert str(error).startswith("grammar:")
