"""Write docs/from_areal.md from the rows of rlx.areal.areal_keys: python docs/from_areal.py

The prose is in from_areal.template.md. tests/areal/areal_yaml_test.py checks the committed page.
"""

import re
import tempfile
from pathlib import Path

from rlx.areal import areal_yaml
from rlx.areal.areal_keys import ROWS, TABLE

PAGE = Path(__file__).with_suffix(".md")
EXAMPLE = """\
experiment_name: sums
trial_name: first
total_train_epochs: 2
gconfig: {n_samples: 4, max_new_tokens: 256}
rollout: {backend: "vllm:d4", max_head_offpolicyness: 2, max_concurrent_rollouts: 64}
actor:
  backend: "fsdp:d4"
  path: Qwen/Qwen2.5-1.5B-Instruct
  optimizer: {lr: 1e-5}
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  reward_norm: {mean_level: group, std_level: group}
  enable_tree_training: true
train_dataset: {path: openai/gsm8k, type: rl, batch_size: 64, max_length: 512}
recover: {mode: auto, freq_secs: 600}
"""


def shown(value: object) -> str:
    """Return a default in the tables' form."""
    return {None: "—", "": "''"}.get(value, str(value)) if not isinstance(value, list) else "[]"


def page() -> str:
    """Return the whole page."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "sums.yaml"
        file.write_text(EXAMPLE)
        output, _ = areal_yaml.convert(str(file), ())
    cell = lambda *cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    code = lambda names: ", ".join(f"`{name}`" for name in names)  # noqa: E731
    (_, *same), *lost = TABLE["unset"]
    values = {
        "input": EXAMPLE.rstrip(),
        "output": output.rstrip(),
        "table": "\n".join(
            cell(f"`{row.to}`", f"`{row.key}`", f"`{shown(row.default)}`", row.says)
            for row in sorted(ROWS, key=lambda row: row.to)
        ),
        "unset": "\n".join(cell(words, code(patterns)) for words, *patterns in lost),
        "same": code(same),
        "first": "\n".join(cell(f"`{old}`", f"`{new}`") for old, new in TABLE["first"].items()),
        "defaults": code(f"{key}={value}" for key, value in TABLE["first_defaults"].items()),
    }
    template = PAGE.with_suffix(".template.md").read_text()
    return re.sub(r"@(\w+)", lambda found: values[found[1]], template)


if __name__ == "__main__":
    PAGE.write_text(page())
