"""Tools that a model calls while it answers: calculator, Python, and those of MCP and users."""

import ast
import asyncio
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from rlx.base import UserError
from rlx.cli import user_code
from rlx.environments import mcp_tools
from rlx.environments.mcp_tools import ToolError
from rlx.rollout.images import data_uri
from rlx.rollout.workflows import close
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system.threads import run_alone

KEY = "rollout.workflow_kwargs.tools"  # the config key that lists tools
_TRIAL_SECONDS = 60.0
_LONGEST_EXPRESSION = 1000  # characters
_MOST_BITS = 4096  # of the calculator's numbers
_TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "array": list,
    "object": dict,
}  # fmt: skip

# A tool has `name`, `description`, `run` (async or not) and `parameters`, a JSON Schema of its
# arguments. The model reads its errors. The schema's first example is tried at the start. Optional:
# `async aclose()`, and `markers`, start → end, in addition to `<name>` and `</name>`.
Tool = Any


class Calculator:
    """Computes arithmetic exactly: integers, decimals, `+ - * / // % **`; up to 1,200 digits."""

    name, description = "calculator", "Computes an arithmetic expression."
    parameters: ClassVar = {
        "type": "object", "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }  # fmt: skip

    async def run(self, expression: str) -> str:
        """Return the value: an integer, or a decimal of 12 digits."""
        try:
            if len(expression) > _LONGEST_EXPRESSION:
                raise ValueError(f"longer than {_LONGEST_EXPRESSION} characters")
            value = _value(ast.parse(expression.strip(), mode="eval").body)
            return str(value) if value.denominator == 1 else f"{float(value):.12g}"
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ToolError(f"it cannot be computed: {error}"[:120]) from None


class Python:
    """Runs Python in a sandbox, each call on its own."""

    name, description = "python", "Runs a Python program; prints are its output."
    markers: ClassVar = {"```python\n": "\n```"}  # a ``` inside a line ends no program
    parameters: ClassVar = {
        "type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"],
        "examples": [{"code": "print(1)"}],
    }  # fmt: skip

    def __init__(self, sandbox: SandboxOptions):
        self._options, self._starting = sandbox, asyncio.Lock()
        self._sandbox: Any = None  # made by the first call

    async def run(self, code: str) -> str:
        """Return what the program prints; if it fails, raise ToolError with that and the error."""
        async with self._starting:
            if self._sandbox is None:
                self._sandbox = await self._options.make(("numpy", "sympy")).__aenter__()
        done = await self._sandbox.run(code)
        if done.status != "ok":
            raise ToolError(f"{done.error or done.status}\n{done.text}".strip())
        return done.text.rstrip("\n")

    async def aclose(self) -> None:
        """End the sandbox; the next call starts another."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.__aexit__(None, None, None)


TOOLS: Mapping[str, type] = {"calculator": Calculator, "python": Python}
_BINARY: Mapping[type, Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def _value(node: ast.expr) -> Fraction:
    """Return the value of an arithmetic node; ValueError for another one, or a large value."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            result = Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _value(left), _value(right)
            bits = (base.numerator * base.denominator).bit_length()
            if power.denominator != 1 or abs(power) * bits > 2 * _MOST_BITS:
                raise ValueError("an exponent is not an integer, or too large")
            result = base ** int(power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = Fraction(_BINARY[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError(f"{type(node).__name__} is not arithmetic")
    if (result.numerator * result.denominator).bit_length() > _MOST_BITS:
        raise ValueError("a number has too many digits")
    return result


def load(names: Sequence[str], sandbox: SandboxOptions) -> list[Tool]:
    """Return tools by name, made with `sandbox` if they take it; UserError if that fails."""
    if isinstance(names, str) or not names:
        raise UserError(f"{KEY}={names!r} names no tools; give a list such as ['calculator']")
    tools: dict[str, Tool] = {}
    for name in names:
        scheme, _, address = name.partition(":")
        tool = None if scheme == "mcp" else user_code.find(KEY, name, TOOLS)
        try:
            for instance in mcp_tools.tools(address) if tool is None else [_tool(tool, sandbox)]:
                _check(instance, tools)
                tools[instance.name] = instance
                for example in instance.parameters.get("examples", [])[:1]:
                    run_alone(_try(instance, example), "trial of a tool", _TRIAL_SECONDS)
        except (Exception, SystemExit) as error:
            why = user_code.where(error, getattr(tool, "run", None))
            raise UserError(f"{KEY}: {name} cannot be used ({why})") from error
    return list(tools.values())


def _tool(tool: Any, sandbox: SandboxOptions) -> Tool:
    if not inspect.isclass(tool):
        return tool
    takes = inspect.signature(tool).parameters
    return tool(**({"sandbox": sandbox} if "sandbox" in takes else {}))


def _check(tool: Any, others: Mapping[str, Tool]) -> None:
    """Raise UserError if an object is not a tool, or has another's name."""
    text, schema = (str, "a text"), (Mapping, "a JSON Schema")
    for part, (kind, wanted) in {"name": text, "description": text, "parameters": schema}.items():
        if not isinstance(value := getattr(tool, part, None), kind):
            raise UserError(f"its {part} is {value!r:.60}; give {wanted}")
    if not tool.name.isidentifier() or tool.name in others:
        raise UserError(f"its name {tool.name!r} is invalid or taken; rename it")
    if "properties" not in tool.parameters or not hasattr(tool, "run"):
        raise UserError("it lacks `run`, or its JSON Schema `properties`; give both")


async def _try(tool: Tool, example: Mapping[str, Any]) -> None:
    try:
        await call(tool, example)
    finally:
        await close(tool)


async def call(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Return a tool's output, an image as a data URI; ToolError for an argument's wrong type."""
    for name, about in tool.parameters["properties"].items():
        kinds = _TYPES.get(str(about.get("type")), object)
        if name in arguments and not isinstance(arguments[name], kinds):
            raise ToolError(f"{name} must be of type {about['type']}")
    if inspect.iscoroutinefunction(tool.run):
        output = await tool.run(**arguments)
    else:
        output = await asyncio.to_thread(tool.run, **arguments)
    return data_uri(output) or str(output)
