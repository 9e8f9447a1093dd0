r"""Whether two short LaTeX expressions are equal, by math-verify, within bounds of its work.

math-verify's own limit is an alarm: seconds of the wall's clock, on the main thread only, and
`9^{9^9}` uses all of it (where sympy computes with gmpy2, no alarm ends it). So a text is measured
before sympy sees it, and what then still takes long is stopped after CPU_SECONDS of processor time,
which is the same on a busy machine: on the main thread by a timer, on another by a watching thread.
Nothing here raises on any text.
"""

import ctypes
import functools
import logging
import math
import re
import signal
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

MAX_LENGTH = 300  # characters of an expression
MAX_DEPTH = 12  # of brackets in brackets
MAX_DIGITS = 50  # of one number
MAX_BITS = 10_000  # of the largest number that computing the expression can meet
CPU_SECONDS = 0.5  # for one answer; usual ones take 0.01 to 0.1

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+|\*\*|\S", re.DOTALL)
_OPEN, _CLOSE = {"{", "(", "[", "\\{"}, {"}", ")", "]", "\\}"}
# What states a task and not its result, or makes sympy work for long, or is another number base.
_REFUSED = re.compile(
    r"\\(?:i+nt|oint|sum|prod|lim|limsup|liminf|partial|nabla|overline|underline|bar)(?![A-Za-z])"
    r"|\\frac\s*\{\s*d\s*[}^]|[0-9]\s*_|['\"#&@?`]|\\\\"
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}|\\text\s*\{")


class _Expired(BaseException):
    """The processor time is used up. Not an Exception: sympy catches those."""


class _TooLarge(Exception):
    """The text nests too deep or could make a number of more than MAX_BITS bits."""


def equal(gold: str, got: str) -> bool:
    """Whether math-verify finds `got` equal to `gold`; False where either is refused.

    Call it by `limited`.
    """
    if not (acceptable(gold) and acceptable(got)):
        return False
    library = _library()
    try:
        wanted, found = _parse(gold), _parse(got)
        if not wanted or not found:
            return False
        return bool(
            library.verify(wanted, found, timeout_seconds=None, allow_set_relation_comp=True)
        )
    except Exception:  # RecursionError and whatever else odd text can raise there
        return False


def acceptable(text: str) -> bool:
    """Whether sympy can be shown the text: short, shallow, all numbers in it of bounded size."""
    if not text or len(text) > MAX_LENGTH or _REFUSED.search(text) or _WORD.search(text):
        return False
    tokens = _TOKEN.findall(text)
    try:
        bits, end = _bits(tokens, 0, 0)
    except _TooLarge:
        return False
    return end == len(tokens) and bits <= MAX_BITS


def limited(function: Callable[..., bool], *args: Any, seconds: float = CPU_SECONDS) -> bool:
    """`function(*args)`, or False where it takes more than `seconds` of processor time.

    Works in any thread; on the main one SIGVTALRM is borrowed meanwhile.
    """
    main = threading.current_thread() is threading.main_thread()
    return (_timed if main else _watched)(function, args, seconds)


@functools.cache
def warm() -> None:
    """Imports math-verify and sympy and builds their tables: seconds, once in a process."""
    _library()
    for text in (r"\sqrt{12}", "(1,2]", r"\frac{x+1}{2}"):
        equal(text, text + "+1")


def forget() -> None:
    """Drops the expressions remembered from earlier answers, for measurements."""
    _parse.cache_clear()


@functools.cache
def _library() -> ModuleType:
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn of a limit left to us
    return math_verify


@functools.cache
def _extraction() -> Any:
    """Reads a box and nothing else. Units are ours: math-verify's would read 5t as 5."""
    from latex2sympy2_extended import NormalizationConfig

    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    return (
        _library().LatexExtractionConfig(
            boxed_match_priority=0, normalization_config=normalization
        ),
    )


@functools.lru_cache(maxsize=256)  # a group's completions share their answer
def _parse(text: str) -> list[Any]:
    return _library().parse(
        f"\\boxed{{{text}}}",
        extraction_config=_extraction(),
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )


def _bits(tokens: list[str], at: int, depth: int) -> tuple[float, int]:
    """A bound on the bits of all numbers met in computing tokens[at:], up to a closing bracket.

    The bits of a product are the sum of its factors', and a sum is no larger than the product;
    a power multiplies them by its exponent's value.

    Returns:
      The bound, and the position of the closing bracket or the end.

    Raises:
      _TooLarge: deeper than MAX_DEPTH, brackets that do not match, or more than MAX_BITS.
    """
    if depth > MAX_DEPTH:
        raise _TooLarge
    total = last = 0.0
    while at < len(tokens) and tokens[at] not in _CLOSE:
        token = tokens[at]
        if token in ("^", "**"):
            exponent, at = _operand(tokens, at + 1, depth)
            if at < len(tokens) and tokens[at] in ("^", "**"):  # a tower; which way is unclear
                raise _TooLarge
            last = max(last, 1.0) * 2 ** min(exponent, 64.0)
        elif token == "!":
            last, at = max(last, 1.0) * 2 ** min(last, 64.0), at + 1
        elif token in ("\\binom", "\\dbinom", "\\tbinom", "\\exp"):
            inner, at = _operand(tokens, at + 1, depth)
            last = 2 ** min(inner, 64.0)
        elif token == "_":
            _, at = _operand(tokens, at + 1, depth)
            continue
        else:
            last, at = _operand(tokens, at, depth)
        total += last
        if total > MAX_BITS:
            raise _TooLarge
    return total, at


def _operand(tokens: list[str], at: int, depth: int) -> tuple[float, int]:
    """The bits of one number, letter, command or bracketed group, and where it ends."""
    while at < len(tokens) and tokens[at] in ("-", "+"):
        at += 1
    if at == len(tokens):
        return 0.0, at
    token = tokens[at]
    if token in _OPEN:
        bits, end = _bits(tokens, at + 1, depth + 1)
        if end == len(tokens):
            raise _TooLarge
        return bits, end + 1  # (1,2] closes otherwise than it opens
    if token in _CLOSE:
        raise _TooLarge
    if token.isdigit():
        if len(token) > MAX_DIGITS or not token.isascii():
            raise _TooLarge
        return math.log2(int(token) + 1), at + 1
    return (1.0 if token.isalpha() else 0.0), at + 1


def _timed(function: Callable[..., bool], args: tuple[Any, ...], seconds: float) -> bool:
    armed = True

    def expire(number: int, frame: Any) -> None:
        if armed:
            raise _Expired

    previous = signal.signal(signal.SIGVTALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)  # again, should sympy swallow it
        try:
            return function(*args)
        finally:
            armed = False
    except _Expired:
        return False
    finally:
        armed = False  # once more: the first may have been where the signal came
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous or signal.SIG_DFL)


def _watched(function: Callable[..., bool], args: tuple[Any, ...], seconds: float) -> bool:
    """For a thread that cannot have signals: a second thread raises _Expired in it."""
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
            armed = False
            _raise_in(thread, None)
        finished.set()
        watcher.join()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises `error` in the thread at its next step; None takes back one not yet raised."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
