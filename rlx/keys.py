"""`rlx keys [PREFIX]`: each key of the config with its default, choices or range, and meaning.

`eval "$(rlx keys --bash)"` completes commands and keys in bash.
"""

from rlx.cli import command
from rlx.cli.key_names import unknown_key
from rlx.config import OPTIONS


def described() -> dict[str, str]:
    """Return each key → one line: its default, the values it may have, and its help."""
    found = {}
    for key, field in sorted(OPTIONS.items()):
        values = field.metadata["values"]
        if isinstance(values, tuple):
            values = " | ".join(values)
        elif values:
            values = f"in {values}" if ", " in values else f"{values} or more"
        shown = f"({values})  " * bool(values)
        found[key] = f"{key}={field.default!r}  {shown}{field.metadata['doc']}"
    return found


_BASH = """\
_rlx() {
  local word=${COMP_WORDS[COMP_CWORD]} words='%s'
  COMPREPLY=()
  [ "$COMP_CWORD" = 1 ] || words='%s'
  case $word in
    --config.*|'') ;;
    -*) words='--config= --config. --workdir= --help' ;;
    *) [ "$COMP_CWORD" = 1 ] || { COMPREPLY=($(compgen -f -- "$word")); return; } ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o nospace -F _rlx rlx"""


def completion() -> str:
    """Return the script that tells a shell the commands and keys of `rlx`."""
    from rlx.__main__ import COMMANDS

    return _BASH % (" ".join(COMMANDS), " ".join(f"--config.{key}=" for key in sorted(OPTIONS)))


def main() -> None:
    """Print a line for each key that begins with the prefix."""
    parser = command.Parser("rlx.keys", description=__doc__)
    parser.add_argument("prefix", nargs="?", default="", help="of keys, as optimizer; default: all")
    parser.add_argument("--bash", action="store_true", help="print a script of completions")
    a, lines = parser.parse_args(), described()
    found = [completion()] if a.bash else [v for k, v in lines.items() if k.startswith(a.prefix)]
    if not found:
        raise unknown_key(a.prefix, {*lines, *(key.rpartition(".")[0] for key in lines)} - {""})
    command.say("\n".join(found))


if __name__ == "__main__":
    command.run(main)
