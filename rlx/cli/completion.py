"""Completion of commands and keys in bash."""

from collections.abc import Iterable

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


def script(commands: Iterable[str], keys: Iterable[str]) -> str:
    """Return what `eval` tells bash of the commands of `rlx`, and of the config's keys."""
    return _BASH % (" ".join(commands), " ".join(f"--config.{key}=" for key in sorted(keys)))
