"""`rlx keys [PREFIX]`: each key of the config with its default, choices or range, and meaning."""

from rlx.cli import command
from rlx.cli.key_names import unknown_key
from rlx.config import OPTIONS


def key_lines() -> dict[str, str]:
    """Return each key → one line: its default, the values it may have, and its help."""
    lines = {}
    for key, field in sorted(OPTIONS.items()):
        values = field.metadata["values"]
        if isinstance(values, tuple):
            values = " | ".join(values)
        elif values:
            values = f"in {values}" if ", " in values else f"{values} or more"
        shown = f"({values})  " * bool(values)
        lines[key] = f"{key}={field.default!r}  {shown}{field.metadata['doc']}"
    return lines


def main() -> None:
    """Print a line for each key that begins with the prefix."""
    parser = command.Parser("rlx.keys", description=__doc__)
    parser.add_argument("prefix", nargs="?", default="", help="of keys, as optimizer; default: all")
    a, lines = parser.parse_args(), key_lines()
    matches = [line for key, line in lines.items() if key.startswith(a.prefix)]
    if not matches:
        raise unknown_key(a.prefix, {*lines, *(key.rpartition(".")[0] for key in lines)} - {""})
    command.say("\n".join(matches))


if __name__ == "__main__":
    command.run(main)
