"""Claims, and the verdict on each: does our figure print as the source prints it?

The rule is one function. A figure is *exact* if it equals the claim; *consistent* if it becomes the claim when
rounded (half up) to the digits that the claim prints, or lies in the range or tolerance that the claim states; a
*conflict* otherwise. What no configuration determines is *not computable*. No verdict is written by hand, except
where two sources disagree in words: those rows are marked as such and state both readings. Read next: `published`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Verdict = Literal["exact", "consistent", "conflict", "not computable"]

UNITS: dict[str, Fraction] = {
    "": Fraction(1),
    "×": Fraction(1),
    "%": Fraction(1, 100),
    "bytes": Fraction(1),
    "KiB": Fraction(2**10),
    "MiB": Fraction(2**20),
    "GiB": Fraction(2**30),
    "TiB": Fraction(2**40),
    "GB": Fraction(10**9),
    "TB": Fraction(10**12),
    "M": Fraction(10**6),
    "B": Fraction(10**9),
    "T": Fraction(10**12),
    "FLOP": Fraction(1),
    "MFLOP": Fraction(10**6),
    "GFLOP": Fraction(10**9),
    "TFLOP": Fraction(10**12),
}
_SCALES = {"bytes": ("KiB", "MiB", "GiB", "TiB"), "FLOP": ("MFLOP", "GFLOP", "TFLOP")}


@dataclass(frozen=True)
class Claim:
    """A number as a source prints it.

    Args:
        text: its digits ("753,864,139,008", "16.97", "1/3"), or a range "low–high".
        unit: a key of UNITS.
        source: where it stands.
        step: the last digit that the source means, where trailing zeros hide it ("750" with step 10).
        within: relative tolerance, for words such as "about unchanged".
        note: what to know about it.
    """

    text: str
    unit: str
    source: str
    step: Fraction | None = None
    within: Fraction | None = None
    note: str = ""

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Low and high end; equal unless the claim is a range."""
        low, _, high = self.text.replace(",", "").partition("–")
        return Fraction(low), Fraction(high or low)

    @property
    def places(self) -> int:
        """Digits after the decimal point."""
        return len(self.text.partition(".")[2])

    def shown(self) -> str:
        """The claim as the table prints it."""
        about = f" (±{float(self.within):.0%})" if self.within else ""
        return with_unit(self.text, self.unit) + about


def judge(value: Fraction, claim: Claim) -> Verdict:
    """Compare `value`, in base units, with `claim`."""
    ours = value / UNITS[claim.unit]
    low, high = claim.bounds()
    if ours == low == high:
        return "exact"
    if low != high:
        return "consistent" if low <= ours <= high else "conflict"
    if claim.within is not None:
        return "consistent" if abs(ours - low) <= claim.within * low else "conflict"
    step = claim.step or Fraction(1, 10**claim.places)
    return "consistent" if _round_half_up(ours / step) * step == low else "conflict"


def _round_half_up(x: Fraction) -> int:
    return int((x + Fraction(1, 2)).__floor__())


@dataclass(frozen=True)
class Row:
    """One line of the ledger. `value` is exact and in base units; None where nothing is computed.

    `claim`, `source` and `verdict` are empty or None for a figure about which no source is quoted. `note` explains
    the figure, `why` the claim. `in_words` marks a disagreement between sources that no arithmetic settles.
    """

    key: str
    section: str
    label: str
    formula: str
    value: Fraction | None
    ours: str
    claim: str = ""
    source: str = ""
    verdict: Verdict | None = None
    note: str = ""
    why: str = ""
    in_words: bool = False


# --------------------------------------------------------------------------- printing numbers
def with_unit(number: str, unit: str) -> str:
    """`12.5 GiB`, `3.1%`, `99×`, `744B`."""
    if unit in ("%", "×", "B", "T", "M"):
        return number + unit
    return f"{number} {unit}" if unit else number


def number(value: Fraction, places: int) -> str:
    """Exactly, if the decimal ends within `places`; else cut off there, with `…` to say that it goes on."""
    scaled = value * 10**places
    whole = scaled.numerator // scaled.denominator
    head, tail = divmod(whole, 10**places)
    digits = f"{head:,}" + (f".{tail:0{places}d}" if places else "")
    if whole != scaled:
        return digits + "…"
    return digits.rstrip("0").rstrip(".") if places else digits


def show(value: Fraction, unit: str) -> str:
    """`value`, in base units, in the unit of its kind that suits its size."""
    for larger in _SCALES.get(unit, ()):
        if value >= UNITS[larger]:
            unit = larger
    return with_unit(number(value / UNITS[unit], 3), unit)


def show_as(value: Fraction, claim: Claim) -> str:
    """`value` in the claim's unit: three digits more than the claim prints, or a fraction if the claim is one."""
    scaled = value / UNITS[claim.unit]
    digits = str(scaled) if "/" in claim.text else number(scaled, claim.places + 3)
    return with_unit(digits, claim.unit)
