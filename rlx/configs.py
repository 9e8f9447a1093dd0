"""List the configs that come with rlx, with what each is: `rlx configs`."""

import ast

from rlx.cli import command
from rlx.cli.flags import shipped


def main() -> None:
    """Print rlx:NAME and the first line of the docstring of each."""
    command.Parser("rlx.configs", description=__doc__).parse_args()
    for name, path in shipped().items():
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        command.say(f"rlx:{name:<28} {words.partition(chr(10))[0]}")


if __name__ == "__main__":
    command.run(main)
