r"""Read an expression, in LaTeX or in plain notation, into a tree. Nothing is evaluated.

``pi/2``, ``2*pi``, ``sqrt(2)/2`` and ``x**2`` are read as ``\frac{\pi}{2}`` is. A letter is a variable, except ``e``
and ``i``; letters that stand together are a product, unless they name a function. What is not known is refused, never
skipped: an answer with a part left out would be another answer. The time is linear in the text.
"""

import re
from fractions import Fraction

from nrl.envs.library.mathematics.lexer import CONSTANTS, DECORATIONS, FONTS, FUNCTIONS, GREEK, Token, tokens_of
from nrl.envs.library.mathematics.nodes import Node, NoValueError, UnreadableError

__all__ = ["parse"]


_APPLIED = frozenset("fghFGHP")  # A letter before parentheses that is a function, not a factor
_ENDS = frozenset([")", "]", "}", "|", ",", "rfloor", "rceil", "+", "-", "=", "<", ">", "end"])
_CALCULUS = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-z])|\\frac ?\{ ?d ?\}")
_LONGEST_NUMBER = 400
_DEEPEST = 60


def parse(text: str) -> Node:
    r"""Read an expression.

    Raises:
        UnreadableError: it is none that is known.

    >>> parse("2*x").kind, parse(r"\frac12") == parse("1/2"), parse("2 1/3").kind
    ('*', True, 'mixed')
    """
    if _CALCULUS.search(text):
        return Node("calculus", (), text)
    return _Parser(text).whole()


def _number(text: str) -> Node:
    if len(text) > _LONGEST_NUMBER:
        raise UnreadableError(f"a number of {len(text)} characters")
    return Node("number", (), Fraction(text.replace(",", "")))


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = tokens_of(text)
        self.at = self.depth = 0

    def whole(self) -> Node:
        if self.peek.kind == "end":
            raise UnreadableError("nothing")
        found = self.sum()
        if self.peek.kind != "end":
            raise UnreadableError(f"{self.peek.text!r}")
        return found

    @property
    def peek(self) -> Token:
        return self.tokens[self.at]

    def take(self) -> Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def sees(self, *texts: str) -> bool:
        return self.peek.text in texts and self.peek.kind != "letters"

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise UnreadableError(f"no {text!r}")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableError("too deep")
        terms = [self.term()]
        while self.sees("+", "-"):
            minus = self.take().text == "-"
            terms.append(Node("-", (self.term(),)) if minus else self.term())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("+", tuple(terms))

    def term(self) -> Node:
        signs = 0
        if self.sees("+", "-"):
            signs += self.take().text == "-"
        found = self.factor()
        while True:
            if self.sees("*", "cdot", "times", "ast"):
                self.take()
                found = self.product(found, self.signed())
            elif self.sees("/", "div"):
                self.take()
                found = Node("/", (found, self.signed()))
            elif self.starts():
                found = self.beside(found)
            else:
                break
        return Node("-", (found,)) if signs % 2 else found

    def signed(self) -> Node:
        if self.sees("-", "+"):
            minus = self.take().text == "-"
            return Node("-", (self.factor(),)) if minus else self.factor()
        return self.factor()

    def beside(self, left: Node) -> Node:
        """Read a factor without a sign before it: a mixed number, or a product."""
        token, before = self.peek, self.tokens[self.at - 1].text
        fraction = token.text in ("frac", "repeating") or token.kind == "number"
        right = self.factor()
        if left.kind == "number" and fraction and right.kind != "%":
            if token.kind == "number" and self.sees("/"):
                self.take()
                right = Node("/", (right, self.factor()))
            top, bottom = right.parts if right.kind == "/" else (right, right)
            if top.kind == bottom.kind == "number" and left.value.denominator == 1:
                if right.kind != "/" or not 0 <= top.value < bottom.value or token.text == "repeating":
                    raise NoValueError("two numbers side by side")
                return Node("mixed", (left, right))
        elif left.kind == "number" and right.kind == "%" and right.parts[0].kind == "/":  # 12\frac{1}{2}\%
            return Node("%", (Node("mixed", (left, right.parts[0])),))
        elif token.kind == "number" and before != "!":
            raise UnreadableError("a number behind a factor")
        return self.product(left, right)

    @staticmethod
    def product(left: Node, right: Node) -> Node:
        return Node("*", (*left.parts, right) if left.kind == "*" else (left, right))

    def starts(self) -> bool:
        """Return whether the next token begins a factor."""
        token = self.peek
        if token.kind == "end" or token.text in _ENDS:
            return False
        return token.kind in ("number", "letters") or token.text in ("(", "[", "{") or token.kind == "command"

    def factor(self) -> Node:
        found = self.base()
        while True:
            if self.sees("^", "**"):
                self.take()
                found = Node("^", (found, self.exponent()))
            elif self.sees("!"):
                self.take()
                double = self.sees("!")
                if double:
                    self.take()
                found = Node("double factorial" if double else "factorial", (found,))
            elif self.sees("%"):
                self.take()
                found = Node("%", (found,))
            elif self.sees("deg"):
                self.take()
                found = Node("degrees", (found,))
            else:
                return found

    def exponent(self) -> Node:
        if self.sees("-", "+"):
            minus = self.take().text == "-"
            return Node("-", (self.exponent(),)) if minus else self.exponent()
        self.depth += 1
        if self.depth > _DEEPEST:
            raise UnreadableError("too deep")
        found = self.base(single=True)
        if self.sees("^", "**"):
            self.take()
            found = Node("^", (found, self.exponent()))
        self.depth -= 1
        return found

    def group(self) -> Node:
        r"""Read the argument of a command: braces, a digit, a letter or a command with its own arguments."""
        token = self.peek
        if token.text == "{":
            self.take()
            found = self.sum()
            self.expect("}")
            return found
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:  # \frac12
            self.tokens[self.at] = Token("number", token.text[1:], False)
            return _number(token.text[0])
        return self.base(single=True)

    def base(self, single: bool = False) -> Node:
        token = self.take()
        match token.kind, token.text:
            case "number", text:
                return _number(text)
            case "letters", text:
                return self.letters(text, single)
            case "sign", "(" | "[" | "{" as opening:
                found = self.sum()
                self.expect({"(": ")", "[": "]", "{": "}"}[opening])
                return found
            case "sign", "|":
                found = self.sum()
                self.expect("|")
                return Node("abs", (found,))
            case "command", name:
                return self.command(name)
        raise UnreadableError(f"{token.text!r}")

    def command(self, name: str) -> Node:
        match name:
            case "frac" | "dfrac" | "tfrac" | "cfrac" | "repeating":
                return Node("/", (self.group(), self.group()))
            case "sqrt":
                if self.sees("["):
                    self.take()
                    index = self.sum()
                    self.expect("]")
                    return Node("root", (self.group(), index))
                return Node("root", (self.group(), Node("number", (), Fraction(2))))
            case "binom" | "dbinom" | "tbinom":
                return Node("binom", (self.group(), self.group()))
            case "lfloor" | "lceil":
                found = self.sum()
                self.expect("r" + name[1:])
                return Node("floor" if name == "lfloor" else "ceil", (found,))
            case "lvert" | "vert":
                found = self.sum()
                if self.take().text not in ("rvert", "vert"):
                    raise UnreadableError("a bar that is not closed")
                return Node("abs", (found,))
        if name in CONSTANTS:
            return Node("constant", (), CONSTANTS[name])
        if name in GREEK:
            return self.named(f"\\{name}")
        if name in DECORATIONS | FONTS:
            token = self.peek
            if token.text != "{":
                return self.named(f"{name} {self.take().text}")
            inner = self.braced()
            if inner.replace(".", "", 1).isdigit() and name in FONTS | {"mathbf", "boldsymbol", "bm"}:
                return _number(inner)
            if name in ("mathrm", "text") and inner in ("e", "i"):
                return self.letters(inner)
            if name in FONTS or not inner.isalnum() or inner[0].isdigit():
                raise UnreadableError(f"\\{name}{{{inner}}}")
            return self.named(f"{name} {inner}")
        if name in FUNCTIONS:
            return self.call(FUNCTIONS[name])
        raise UnreadableError(f"\\{name}")

    def letters(self, text: str, single: bool = False) -> Node:
        if text in CONSTANTS:
            return Node("constant", (), CONSTANTS[text])
        if text in FUNCTIONS:
            return self.call(FUNCTIONS[text])
        if text in GREEK:
            return self.named(f"\\{text}")
        known = next((name for name in sorted((*FUNCTIONS, "pi"), key=len, reverse=True) if text.endswith(name)), None)
        if known and not single and len(known) > 1 and len(text) > len(known) <= 6 and known not in ("re", "lg", "abs"):
            rest = text[: -len(known)]
            if len(rest) == 1:  # xsin(x)
                self.at -= 1
                self.tokens[self.at : self.at + 1] = [Token("letters", each, False) for each in (rest, known)]
                return self.letters(self.take().text)
        if len(text) > 6:
            raise UnreadableError(f"the word {text!r}")
        if len(text) > 1:  # Take the first letter only; the others follow as factors.
            self.at -= 1
            self.tokens[self.at : self.at + 1] = [Token("letters", each, False) for each in text]
            self.at += 1
        letter = text[0]
        if letter in "ei" and not self.sees("_"):
            return Node("constant", (), letter)
        if letter in _APPLIED and self.sees("(") and not self.peek.spaced:
            return Node("call", self.arguments(), letter)
        behind = self.peek
        numbered = behind.kind == "number" and not behind.spaced and behind.text.isdigit() and len(behind.text) < 3
        if numbered and not single and len(text) == 1:  # x1, as programs name it
            return self.named(f"{letter}_{self.take().text}")
        return self.named(letter)

    def named(self, name: str) -> Node:
        if self.sees("_"):
            self.take()
            name += "_" + self.subscript()
        while self.sees("'"):
            self.take()
            name += "'"
        return Node("symbol", (), name)

    def subscript(self) -> str:
        if not self.sees("{"):
            token = self.take()
            if token.kind not in ("number", "letters", "command"):
                raise UnreadableError("an empty subscript")
            return token.text
        return self.braced()

    def braced(self) -> str:
        """Return the text up to the brace that closes the next one."""
        self.take()
        inner = ""
        while not self.sees("}"):
            if self.peek.kind == "end":
                raise UnreadableError("a brace that is not closed")
            inner += self.take().text
        self.take()
        return inner

    def arguments(self) -> tuple[Node, ...]:
        opening = self.take().text
        found = [self.sum()]
        while self.sees(","):
            self.take()
            found.append(self.sum())
        self.expect({"(": ")", "{": "}", "[": "]"}[opening])
        return tuple(found)

    def call(self, name: str) -> Node:
        if name == "log" and self.sees("_"):
            self.take()
            base = self.group() if not self.sees("(") else self.base(single=True)
            power = self.power()
            return self.raised(Node("log", (self.argument(), base)), power)
        power = self.power()
        if name in ("max", "min", "gcd", "lcm", "binom"):
            if not self.sees("(", "{"):
                raise UnreadableError(f"{name} without arguments")
            return self.raised(Node(name, self.arguments()), power)
        if power is not None and power.kind == "-" and name in ("sin", "cos", "tan", "cot"):  # \sin^{-1} x
            if power.parts[0] != Node("number", (), Fraction(1)):
                raise UnreadableError(f"a negative power of {name}")
            return Node(f"arc{name}", (self.argument(),))
        argument = self.argument()
        if name == "cis":
            turned = Node("*", (Node("constant", (), "i"), Node("sin", (argument,))))
            return Node("+", (Node("cos", (argument,)), turned))
        if name in ("sqrt", "cbrt"):
            return self.raised(Node("root", (argument, Node("number", (), Fraction(2 + (name == "cbrt"))))), power)
        return self.raised(Node(name, (argument,)), power)

    def power(self) -> Node | None:
        if not self.sees("^"):
            return None
        self.take()
        return self.exponent()

    @staticmethod
    def raised(node: Node, power: Node | None) -> Node:
        return node if power is None else Node("^", (node, power))

    def argument(self) -> Node:
        """Read what a function is of: parentheses, or factors up to a sign or another function."""
        if self.sees("(", "{", "["):
            return self.base()
        if self.peek.kind == "end" or (self.peek.text in _ENDS and self.peek.text != "|"):
            raise UnreadableError("a function of nothing")
        signs = 0
        while self.sees("-"):
            self.take()
            signs += 1
        found = self.factor()
        while self.starts() and self.peek.text not in FUNCTIONS and not self.sees("(", "["):
            found = self.beside(found)
        if self.sees("/") and found.kind in ("constant", "number", "*"):
            self.take()
            found = Node("/", (found, self.factor()))
        return Node("-", (found,)) if signs % 2 else found
