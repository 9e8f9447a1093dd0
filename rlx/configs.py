"""List the configs that come with rlx, with what each is: `rlx configs`."""

import ast
from pathlib import Path

from rlx.cli import command
from rlx.run.flags import shipped_configs


def variants(path: Path) -> dict[str, str]:
    """Return argument → summary of a config, from its docstring ("") and its table VARIANTS."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    summaries = {"": (ast.get_docstring(tree) or "").partition("\n")[0]}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VARIANTS":
            assert isinstance(node.value, ast.Dict)
            for name, row in zip(node.value.keys, node.value.values, strict=True):
                texts = [n.value for n in (name, *ast.walk(row)) if isinstance(n, ast.Constant)]
                summaries[str(texts[0])] = str(texts[1])
    return summaries


def main() -> None:
    """Print rlx:NAME, or rlx:NAME:VARIANT, and a summary of each."""
    command.Parser("rlx.configs", description=__doc__).parse_args()
    for name, path in shipped_configs().items():
        for variant, words in variants(path).items():
            command.say(f"{f'rlx:{name}:{variant}'.rstrip(':'):<32} {words}")


if __name__ == "__main__":
    command.run(main)
