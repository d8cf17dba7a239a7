"""Decide whether an answer is worked out, or leaves the work to the verifier."""

from fractions import Fraction

from nrl.envs.library.mathematics.evaluating import exact
from nrl.envs.library.mathematics.kinds import (
    Answer,
    Choice,
    Congruence,
    Listing,
    Matrix,
    Named,
    Point,
    Quantity,
    Ratio,
    Region,
    Relation,
)
from nrl.envs.library.mathematics.nodes import Node, functions_in, operations, symbols_in

__all__ = ["is_worked", "last_side", "values_in"]


def values_in(found: Answer) -> list[Node]:
    """Return all expressions of an answer."""
    match found:
        case Quantity():
            return [found.value]
        case Listing() | Point():
            return [value for item in found.items for value in values_in(item)]
        case Region():
            return [*found.without, *(end for piece in found.pieces for end in (piece.low, piece.high))]
        case Relation():
            return [found.left, found.right]
        case Named():
            return values_in(found.value)
        case Matrix():
            return [cell for row in found.rows for cell in row]
        case Ratio():
            return list(found.parts)
        case Congruence():
            return [found.residue, found.modulus]
        case Choice() if found.option is not None:
            return values_in(found.option)
    return []


def last_side(value: Answer, named: Named) -> Answer:
    """Return the side of a calculation that counts, which is the last."""
    calculation = named.equation is not None and named.equation.sign == "chain"
    return value.items[-1] if calculation and isinstance(value, Listing) else value


def is_worked(right: Answer, found: Answer) -> bool:
    """Return whether an answer is as far worked out as the reference.

    Where the reference is a number, the answer is a numeral; so are the parts of intervals, ratios, matrices and the
    like. Where the reference is a solution, the answer is no equation. A list and a remainder are no number.
    """
    match right, found:
        case (_, Region()) if not found.solved and not (isinstance(right, Region) and not right.solved):
            return False
        case (Named() | Region(), Relation()):
            return bool(_free(right) - {right.name})
        case (Relation(), Relation() | Named()):
            return True
        case (Named(), Named()):
            solved = right.equation is None or not _free(right.value) or bool(_free(found.value))
            return solved and is_worked(last_side(right.value, right), last_side(found.value, found))
        case (Named(), _):
            return is_worked(last_side(right.value, right), found)
        case (_, Named()):
            return is_worked(right, last_side(found.value, found))
        case (Choice(), _) if right.option is not None:
            return is_worked(right.option, found)
        case (_, Choice()) if found.option is not None:
            return is_worked(right, found.option)
        case (Congruence(), Quantity()) if not found.integer:
            return is_worked(Quantity(right.residue), found)
        case (Congruence(), Congruence()):
            return _is_number_worked(right.residue, found.residue)
        case (Quantity(), Congruence()) if right.integer:
            residue, modulus = exact(found.residue), exact(found.modulus)
            return residue is None or modulus is None or abs(residue) < modulus
        case (Quantity(), Congruence() | Point()):
            return False
        case (Quantity(), Listing()) if len(found.items) == 1:
            return is_worked(right, found.items[0])
        case (Quantity(), Quantity()):
            return _is_number_worked(right.value, found.value)
        case (Listing() | Point(), Listing() | Point()) if len(right.items) == len(found.items):
            bare = [
                [last_side(item.value, item) if isinstance(item, Named) else item for item in side.items]
                for side in (right, found)
            ]
            if all(isinstance(item, Quantity) and _is_numeral(item.value) for item in bare[0]):
                return all(not isinstance(item, Quantity) or _is_numeral(item.value) for item in bare[1])
        case (Relation(), Quantity()):
            return False  # The number alone is no equation of a line.
        case (Quantity(), Relation()):
            return _is_number_worked(right.value, found.right)
    values = values_in(right)
    if not values or isinstance(right, Congruence):
        return True
    return all(_is_part_worked(values, part) for part in values_in(found))


def _is_part_worked(rights: list[Node], part: Node) -> bool:
    """Return whether a part of an answer is as far worked out as one of the parts of the reference."""
    rational = exact(part) is not None or (part.kind == "root" and _is_unfinished(part))
    if rational and not _is_numeral(part):  # Beside an irrational part, 1+1 is still a number to be worked out.
        rights = [right for right in rights if exact(right) is not None]
    return any(_is_number_worked(right, part) for right in rights)


def _free(found: Answer) -> set[str]:
    return set[str]().union(*map(symbols_in, values_in(found)))


def _is_number_worked(right: Node, found: Node) -> bool:
    if symbols_in(right):
        return True
    if symbols_in(found):
        return False
    if _is_numeral(right):
        return _is_numeral(found) or _is_rounded(right, found)
    if _is_gaussian(right) and _is_unfinished(found) and not _is_unfinished(right):
        return False
    return functions_in(found) <= functions_in(right) and operations(found) <= 2 * operations(right) + 3


def _is_unfinished(node: Node) -> bool:
    """Return whether an expression has arithmetic of rational numbers left, as ``1+2+4i`` and ``sqrt(4)i`` have."""
    if _is_numeral(node):
        return False
    numbers = [part for part in node.parts if exact(part) is not None]
    match node.kind:
        case "+":
            imaginary = [part for part in node.parts if "i" in _constants(part) and not symbols_in(part)]
            unfinished = len(numbers) > 1 or len(imaginary) > 1
        case "*" | "binom":
            unfinished = len(numbers) > 1
        case "^":
            base, power = node.parts
            whole = exact(power)
            gaussian = base.kind in ("+", "*") and bool(_constants(base) & {"i"}) and not symbols_in(base)
            unfinished = whole is not None and whole.denominator == 1 and (bool(numbers[1:]) or gaussian)
        case "root":
            radicand, index = (exact(part) for part in node.parts)
            unfinished = radicand is not None and index is not None and _has_root(radicand, index)
        case _:
            unfinished = node.kind not in ("/", "-", "%", "degrees", "number", "constant", "symbol") and (
                exact(node) is not None
            )
    if node.kind == "*" and sum(part.kind == "+" and "i" in _constants(part) for part in node.parts) > 1:
        return True  # (2+i)(2+i)
    return unfinished or any(map(_is_unfinished, node.parts))


def _is_gaussian(node: Node) -> bool:
    """Return whether an expression is a complex number whose parts are rational."""
    if node.kind == "constant":
        return bool(node.value == "i")
    return node.kind in ("number", "mixed", "+", "-", "*", "/") and all(map(_is_gaussian, node.parts))


def _constants(node: Node) -> set[str]:
    own = {str(node.value)} if node.kind == "constant" else set[str]()
    return own.union(*map(_constants, node.parts))


def _has_root(radicand: Fraction, index: Fraction) -> bool:
    """Return whether a root of a rational number is rational."""
    if index.denominator != 1 or not 1 < index < 64 or radicand < 0:
        return False
    return all(
        round(part ** (1 / int(index))) ** int(index) == part for part in radicand.as_integer_ratio() if part < 2**52
    )


def _is_rounded(right: Node, found: Node) -> bool:
    r"""Return whether a number may be the rounding of an irrational one that is short, such as ``\sqrt{2}``."""
    number = exact(right)
    if number is None or number.denominator == 1:
        return False
    digits = next((len(str(abs(number) * 10**n)) for n in range(31) if (number * 10**n).denominator == 1), 0)
    return digits >= 6 and exact(found) is None and functions_in(found) <= {"logarithm"} and operations(found) <= 4


def _is_numeral(node: Node) -> bool:
    """Return whether an expression is one number that is worked out, at most a fraction, per cent, or 3.5 * 10^-5."""
    match node.kind:
        case "number" | "mixed":
            return True
        case "-" | "%" | "degrees":
            return node.parts[0].kind != node.kind and _is_numeral(node.parts[0])
        case "/":
            return all(
                part.kind == "number" or (part.kind == "-" and part.parts[0].kind == "number") for part in node.parts
            )
        case "^":
            return _is_power_of_ten(node)
        case "*" if node.value == "factor":  # that of a matrix
            return all(map(_is_numeral, node.parts))
        case "*" if len(node.parts) == 2:
            factor, power = node.parts
            factor = factor.parts[0] if factor.kind == "-" else factor
            return factor.kind == "number" and _is_power_of_ten(power) and 1 <= abs(factor.value) < 10
    return False


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "^" or node.parts[0].kind != "number" or node.parts[0].value != 10:
        return False
    power = exact(node.parts[1])
    return power is not None and power.denominator == 1
