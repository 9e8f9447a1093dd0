r"""Ask math-verify whether two short LaTeX expressions are equal, within bounds of its work.

math-verify's own limit is an alarm, on the main thread only, and no alarm ends `9^{9^9}`, which
sympy computes in C. So `size` measures a text before sympy sees it, and `limited` stops what still
takes CPU_SECONDS of processor time. No text raises.
"""

import ctypes
import functools
import importlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_LENGTH = 300  # characters of an expression
MAX_DEPTH = 12  # of brackets in brackets
MAX_BITS = 30_000  # of the largest number that computing the expression can meet
CPU_SECONDS = 0.5  # for one answer; usual ones take 0.01 to 0.1

# A task and not its result, what makes sympy work for long, another number base, words, no ASCII.
_REFUSED = re.compile(
    r"\\(?:i+nt|oint|sum|prod|lim|limsup|liminf|partial|nabla|overline|underline|bar)(?![A-Za-z])"
    r"|\\[dtc]?frac\s*\{\s*d\s*[}^]|[0-9]\s*_|['\"#&@?`]|\\\\|\\text\s*\{|(?<![\\A-Za-z])[A-Za-z]{4,}"
    r"|[0-9]{51}|[^\x00-\x7f]|\\[lcdv]?dots|^[A-Z]{2,}$"
)
_MATRIX = re.compile(r"\\(?:begin|end)\s*\{[pbBvV]?matrix\}(?!\s*\^)|\\\\|&")
_GROUP = re.compile(r"(?:\\\{|[({[])((?:[^][(){}\\]|\\[^{}])*)(?:\\\}|[)}\]])")  # holds no other
_TOKEN = re.compile(r"§[^§]*§|\\[A-Za-z]+|\\.|[0-9]+|\*\*|\S")
_POWERS = ("^", "**")
_FAST = {"\\exp", "\\sinh", "\\cosh", "\\tanh", "\\coth", "\\binom", "\\dbinom", "\\tbinom"}
_SIGNS = re.compile(r"(?<=[*^])[\s+-]+")  # of an exponent


class _Expired(BaseException):
    """The processor time is used up. Not an Exception: sympy catches those."""


def equal(gold: str, answer: str, tolerance: Fraction = Fraction(0)) -> bool:
    """Return whether math-verify finds `answer` equal to `gold`; False where either is refused.

    Call it by `limited`, after `warm`. Two numbers may differ by `tolerance`, ≥ 0.
    """
    # math-verify compares to 15 places, where 10^{-17} and 10^{-18} are both 0. Two different
    # numbers of this many bits differ within the places given here.
    bits = size(gold) + size(answer)
    return bits <= 2 * MAX_BITS and _verify(gold, answer, 40 + int(0.7 * bits), tolerance)


def size(text: str) -> float:
    """Return a bound on the bits of the numbers in a short and shallow text; else infinity."""
    text = _MATRIX.sub(",", text)
    if not text or len(text) > MAX_LENGTH or _REFUSED.search(text):
        return math.inf
    for _ in range(MAX_DEPTH):  # the innermost brackets first, each replaced by its bits
        text = _GROUP.sub(lambda group: f"§{_bits(group[1])}§", text)
    bits = _bits(text)
    return bits if bits <= MAX_BITS else math.inf


def limited(function: Callable[..., bool], *args: Any, seconds: float = CPU_SECONDS) -> bool:
    """Return `function(*args)`, or False after `seconds` of processor time; in any thread."""
    # A second thread raises _Expired in this one, again and again if sympy swallows it.
    thread, armed, finished = threading.get_ident(), True, threading.Event()
    lock, clock = threading.Lock(), time.pthread_getcpuclockid(threading.get_ident())
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not finished.wait(0.05):
            with lock:
                if armed and time.clock_gettime(clock) > end:
                    _raise_in(thread, _Expired)

    watcher = threading.Thread(target=watch, name="rlx-grade-limit", daemon=True)
    watcher.start()
    try:
        try:
            return function(*args)
        finally:
            with lock:
                armed = False
    except _Expired:
        return False
    finally:
        with lock:
            armed = False  # once more: the first may have been where the exception came
            _raise_in(thread, None)
        finished.set()
        watcher.join()


@functools.cache
def warm() -> None:
    """Import math-verify and sympy and build their tables, which takes seconds, once."""
    # One for each part of sympy that is imported when it is first needed, within somebody's limit.
    for text in (r"\sqrt{12}", "(1,2]", r"\frac{x+1}{2}", r"e^{i\pi}", r"\sin(2)", r"\log_3 7"):
        _verify(text, text + "+1", 15, Fraction(0))
    importlib.import_module("sympy.physics.units")  # by `simplify`


@functools.lru_cache(maxsize=256)  # a group's completions share their answer
def parsed(text: str) -> list[Any]:
    """Return math-verify's reading of an expression, with exact decimals and i."""
    import sympy

    def exact(value: Any) -> Any:
        atoms = value.atoms(sympy.Float, sympy.Symbol) if hasattr(value, "atoms") else ()
        swaps = {a: sympy.Rational(str(a)) if a.is_Float else sympy.I
                 for a in atoms if a.is_Float or a.name == "i"}  # fmt: skip
        return value.xreplace(swaps) if swaps else value

    library, config = _library()
    options = {"fallback_mode": "no_fallback", "parsing_timeout": None}
    return list(map(exact, library.parse(f"\\boxed{{{text}}}", config, **options)))


def _verify(gold: str, answer: str, digits: int, tolerance: Fraction) -> bool:
    options = {"numeric_precision": digits, "timeout_seconds": None}
    try:
        if not ((left := parsed(gold)) and (right := parsed(answer))):
            return False
        if _library()[0].verify(left, right, allow_set_relation_comp=True, **options):
            return True
        difference = left[0] - right[0]
        return bool(difference.is_number and abs(difference.evalf(digits, chop=True)) <= tolerance)
    except Exception:  # RecursionError and whatever else odd text can raise there
        return False


@functools.cache
def _library() -> tuple[Any, Any]:
    """Return math-verify, and its configuration for a box."""
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn of a limit left to us
    form = NormalizationConfig(  # with units it would read 5t as 5
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=form)
    return math_verify, (config,)


def _bits(text: str) -> float:
    """Return a bound on the bits of all numbers met in computing a text without brackets.

    The bits of a product are the sum of its factors', and a sum is no larger than the product;
    a power multiplies them by its exponent's value. A bracket that is left has no bound.
    """
    sizes: list[float] = [0.0]
    before = previous = ""
    for token in _TOKEN.findall(_SIGNS.sub("", text)):
        if token in ("{", "}", "[", "]", "(", ")", "\\{", "\\}"):
            return math.inf
        bits = 2.0 if token.isalpha() or token == "\\pi" else 0.0  # e is more than 2, π than 3
        if token.isdigit() or token[0] == "§":
            # A backslash in front of a mark takes its first sign; the last one is left.
            inner = token.strip("§") or "inf"
            bits = math.log2(int(token) + 1) if token.isdigit() else float(inner)
        if token in _POWERS and before in _POWERS:  # a tower; which way is unclear
            return math.inf
        if previous in _POWERS or token == "!":
            exponent = sizes[-1] if token == "!" else bits
            sizes[-1] = max(sizes[-1], 1.0) * 2 ** min(exponent, 64.0)
        elif previous in _FAST:
            sizes.append(2 * 2 ** min(bits, 64.0))
        elif token not in _POWERS and "_" not in (previous, token):
            sizes.append(bits)
        before, previous = previous, token
    return sum(sizes)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in the thread at its next step; None takes back one not yet raised."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
