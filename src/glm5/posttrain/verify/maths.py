r"""Mathematical answers, compared by Math-Verify, with what it accepts and should not taken back.

Math-Verify 0.9.0 reads the longest beginning of a text that its grammar knows and forgets the rest. So it takes `4`
for `4\sqrt(2)`, `1+1/\mathrm{e}` for `1-1/\mathrm{e}`, and "1728" for "1331 and 1728" (its issues 41 and 47, pull
request 82; all three reproduced). Here its grammar must read an answer to the last character, lists are read item by
item, numbers agree relative to their size, and units agree where both sides have one. Its own comparison, by sympy,
then decides. Its alarms, which fail outside the main thread, never run: `pool` holds the time. Read next: `extract`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import latex2sympy2_extended.latex2sympy2 as latex
import sympy
from antlr4 import Token
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify.grader import should_treat_as_complex, verify

from glm5.posttrain.verify.extract import final_answer, last_box
from glm5.posttrain.verify.short import normal
from glm5.posttrain.verify.verdict import Verdict, judged, no_verdict

logging.getLogger("math_verify").setLevel(logging.ERROR)

TOLERANCE = 5e-6  # relative, where an answer is a decimal: 0.333333 is a third

_UNDONE = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)

# Case matters: `n` is not `N`.
_CONVERSION = latex.ConversionConfig(lowercase_symbols=False)
_NORMALIZATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_SEPARATORS = re.compile(
    r"\\(?:text|mathrm|textrm)\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|;|\\quad", re.IGNORECASE
)
_UNIT = re.compile(r"(?:\\[ ,;!]|~|\s)*\\(?:text|mathrm|textrm|operatorname)\s*\{\s*([^{}\d]*?)\s*\}\s*$")
# A number and words behind it: `12 apples`.
_WORDS = re.compile(r"(?<=[\d}$])\s+([A-Za-z]{3,}(?:\s+[A-Za-z]+)*)\s*$")
# The base of a number: `101_2`.
_BASE = re.compile(r"(?<=\d)_\{?(\d+)\}?\s*$")


class _Whole(latex._Latex2Sympy):
    """The library's parser, which must come to the end of its text."""

    def create_parser(self, latex_str: str) -> Any:
        self.last = super().create_parser(latex_str)
        return self.last

    def read(self, text: str) -> Any:
        """Raises ValueError where something is left."""
        found = self.parse(text)
        if self.last.getTokenStream().LA(1) != Token.EOF and not latex.comma_number_regex.match(text):
            raise ValueError(f"{text!r} can be read in part only")
        return found


def check(response: str, answer: Any, info: Mapping[str, Any]) -> Verdict:
    """Whether the response's final answer equals the expected one: a number or text, LaTeX or plain."""
    gold = str(answer).strip()
    gold = last_box(gold) or gold
    said = final_answer(response)
    if said is None:
        return judged(False, "no final answer")
    if _plain(said) == _plain(gold):
        return judged(True, f"{said!r} is what was expected")
    if re.fullmatch(r"[A-Za-z]{2,}", gold) and gold != "pi":  # a word, whose letters are not factors
        return judged(normal(said) == normal(gold), f"{said!r} for {gold!r}")
    gold_unit, said_unit = _unit(gold), _unit(said)
    expected = _read(_without_unit(gold))
    if expected is None:
        return no_verdict(f"the expected answer {gold!r} cannot be read")
    found = _read(_without_unit(said))
    if found is None:
        return judged(False, f"{said!r} cannot be read")
    if gold_unit and said_unit and gold_unit != said_unit:
        return judged(False, f"{said!r} has another unit than {gold!r}")
    try:
        if _restates(expected, found, said):
            return judged(False, f"{said!r} is the question of {gold!r}, not its answer")
        return judged(_equal(expected, found), f"{said!r} for {gold!r}")
    except Exception as e:  # whatever sympy raises: of the answer's making, unless the expected one does it alone
        try:
            _equal(expected, expected)
        except Exception:
            return no_verdict(f"the expected answer {gold!r} cannot be compared: {type(e).__name__}")
        return judged(False, f"{said!r} cannot be compared: {type(e).__name__}")


def _restates(expected: Any, found: Any, said: str) -> bool:
    """Whether an answer leaves the work undone: an integral, a sum or a limit as it was asked, or, where a number is
    expected, sums and products of numbers. Fractions, powers, roots and `1.5 \\times 10^3` are answers."""
    value = found.rhs if isinstance(found, sympy.Eq) else found
    if not isinstance(value, sympy.Basic):
        return False
    if value.has(*_UNDONE):
        return not expected.has(*_UNDONE)
    if not isinstance(expected, sympy.Expr) or not isinstance(expected.doit(), sympy.Rational):
        return False
    for node in sympy.preorder_traversal(value):
        if isinstance(node, sympy.Add) and not node.free_symbols and re.search(r"(?<=[\w})])\s*[+-]", said):
            return True  # where no sign stands between them, a mixed number
        if isinstance(node, sympy.Mul):
            factors = [int(abs(a)) for a in node.args if a.is_Integer and abs(a) > 1]
            if sum(str(f).strip("0") != "1" for f in factors) > 1:
                return True
    return False


def _equal(expected: Any, found: Any) -> bool:
    if isinstance(expected, FiniteSet) != isinstance(found, FiniteSet):
        # One answer is no list of them; a list of one is.
        alone = expected if isinstance(expected, FiniteSet) else found
        if len(alone.args) != 1:
            return False
    claims = [found] if isinstance(found, sympy.Eq) else [x for x in found.args if isinstance(x, sympy.Eq)]
    if any(not claim.free_symbols and not bool(claim.doit()) for claim in claims):
        return False  # `13 = 12` is not 12
    if not verify([expected], [found], timeout_seconds=None):
        return False
    numbers = [_number(x) for x in (expected, found)]
    if numbers[0] is None or numbers[1] is None:
        return True
    return bool(abs(numbers[0] - numbers[1]) <= TOLERANCE * max(abs(numbers[0]), abs(numbers[1])))


def _number(value: Any) -> Any:
    """A real number to 30 digits; None for anything else, and for percentages, which the library reads on purpose."""
    if not isinstance(value, sympy.Expr) or value.free_symbols or value.has(sympy.UnevaluatedExpr):
        return None
    found = sympy.N(value, 30)
    return found if found.is_comparable else None


def _read(text: str) -> Any:
    """The expression that a text stands for, all of it, or None."""
    items = [item for item in (part.strip().strip(",").strip() for part in _SEPARATORS.split(_bare(text))) if item]
    try:
        read = [_item(item) for item in items]
    except Exception:  # the library raises bare Exceptions, sympy all kinds
        return None
    if not read or any(r is None for r in read):
        return None
    if len(read) == 1:
        return read[0]
    members = [member for r in read for member in (r.args if isinstance(r, FiniteSet) else (r,))]
    return FiniteSet(*members)


def _item(text: str) -> Any:
    text = normalize_latex(text, _NORMALIZATION)
    if not re.search(r"[^\s{}]", text) or re.search(r"\d\s+\d{1,2}(?!\d)", text):  # `1 2` is not 12
        return None
    return _Whole(is_real=not should_treat_as_complex(text), config=_CONVERSION).read(text)


def _bare(text: str) -> str:
    r"""Without dollar signs, display marks and a final stop; `\sqrt(2)`, `\mathrm{e}`, `1e3` spelled."""
    text = text.strip().rstrip(".").strip()
    text = re.sub(r"\\[()\[\]]|\\?\$", "", text)
    text = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![ \d])", lambda m: m.group().replace(" ", ""), text)
    text = re.sub(r"(?<![A-Za-z\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\(?:mathrm|text|textrm)\s*\{\s*([a-zA-Z])\s*\}", r"\1", text)
    text = re.sub(r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", "", text)
    return re.sub(r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).strip()


def _unit(text: str) -> str:
    """The unit that a text ends with, or nothing."""
    text = text.strip().strip("$")
    found = _UNIT.search(text) or _WORDS.search(text) or _BASE.search(text)
    if found is None or not text[: found.start()].strip("$ "):
        return ""
    unit = found.group(1).strip()
    return "" if unit.lower() in ("and", "or", "e", "i") else unit


def _without_unit(text: str) -> str:
    text = text.strip().strip("$")
    found = _UNIT.search(text) or _WORDS.search(text) or _BASE.search(text)
    return text[: found.start()] if found and _unit(text) else text


def _plain(text: str) -> str:
    return " ".join(_bare(text).split())
