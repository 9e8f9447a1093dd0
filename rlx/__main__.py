"""`rlx COMMAND …`, or `python -m rlx COMMAND …`: all commands behind one name.

`rlx train --config=rlx:arithmetic` is `python -m rlx.main --config=rlx:arithmetic`, and so on.
"""

import runpy
import sys

from rlx import __version__
from rlx.base import unknown
from rlx.cli import command

COMMANDS = {  # module, what it does
    "train": ("rlx.main", "train or resume: --config=FILE or --config=rlx:NAME"),
    "serve": ("rlx.serve", "start one rollout server"),
    "k8s": ("rlx.k8s", "print a run's manifests for Kubernetes"),
    "cluster": ("rlx.cluster", "start servers on machines with ssh"),
    "gateway": ("rlx.gateway", "serve the HTTP APIs of OpenAI and Anthropic"),
    "tinker": ("rlx.tinker", "serve Tinker's API: training and sampling of LoRA adapters"),
    "evaluate": ("rlx.evaluate", "score models, without a trainer"),
    "compare": ("rlx.compare", "compare an engine's logprobs with the trainer's and transformers'"),
    "convert": ("rlx.convert", "convert a checkpoint to an HF directory, or back"),
    "push": ("rlx.push", "upload a run's weights to the Hugging Face hub, with a model card"),
    "areal": ("rlx.areal", "translate AReaL's YAML file to a config"),
    "keys": ("rlx.keys", "list every key of a config with default, values and meaning"),
    "configs": ("rlx.configs", "list the configs that come with rlx, for --config=rlx:NAME"),
    "replay": ("rlx.replay", "train a run's recorded batches again, and compare bit for bit"),
    "sweep": ("rlx.sweep", "train with each combination of values: KEY=V1,V2 seed=0,1"),
    "runs": ("rlx.runs", "list runs: settings, steps, held-out results, states"),
    "status": ("rlx.status", "show where a run stands, from another terminal"),
    "report": ("rlx.report", "write a run's report again, or lay runs over one another"),
    "plan": ("rlx.plan", "find the split of GPUs, the seconds and the memory of a run"),
    "doctor": ("rlx.doctor", "find problems that would stop rlx, or a run"),
    "debug-workflow": ("rlx.debug_workflow", "debug an agent with any OpenAI-compatible server"),
}
_COMPLETION = """\
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
complete -o nospace -F _rlx rlx"""  # of commands and keys in bash


def main() -> None:
    """Run the command that comes first, as `python -m` would; without one, list them."""
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        name = sys.argv.pop(1)
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    command.run(_answer)


def _answer() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    answers = {"--version": f"rlx {__version__}"} | dict.fromkeys(("--help", "-h"), _usage())
    if word == "completion":  # eval "$(rlx completion)" in bash
        from rlx.config import OPTIONS

        keys = " ".join(f"--config.{key}=" for key in sorted(OPTIONS))
        answers[word] = _COMPLETION % (" ".join([*COMMANDS, word]), keys)
    if word not in answers:
        raise unknown("command", word, COMMANDS)
    command.say(answers[word])


def _usage() -> str:
    rows = [f"  {name:<15} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: rlx COMMAND …; rlx COMMAND --help lists its flags", "", *rows])


if __name__ == "__main__":
    main()
