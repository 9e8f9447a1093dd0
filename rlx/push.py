"""`rlx push WORKDIR OWNER/NAME`: upload a run's exported weights to the Hugging Face hub.

WORKDIR/hf becomes the repository's files, with a model card. A LoRA run's adapter goes into
`adapter`. --print shows the card and uploads nothing. $HF_TOKEN or `hf auth login` gives access.
"""

from pathlib import Path

from rlx.base import UserError
from rlx.cli import command, user_code
from rlx.doctor import failures


def main() -> None:
    """Upload the files in one commit for each directory, and print the repository's address."""
    parser = command.Parser("rlx.push", description=__doc__, allow_abbrev=False)
    parser.add_argument("workdir", type=Path, help="the --workdir of a run")
    parser.add_argument("repository", help="OWNER/NAME, made if it is not there")
    parser.add_argument("--license", default="", help="as the hub spells it, such as apache-2.0")
    parser.add_argument("--public", action="store_true", help="a new repository is public")
    parser.add_argument("--print", action="store_true", help="only print the card")
    a = parser.parse_args()
    from huggingface_hub import HfApi

    from rlx.config import default
    from rlx.observe.model_card import card
    from rlx.train.checkpoint import checkpoints, step_of

    if not (a.workdir / "hf/config.json").exists():
        raise UserError(f"{a.workdir} has no exported weights in hf/; give a run's --workdir")
    # Records of a killed run may be of later steps than hf/, which is as the last checkpoint.
    step = max(map(step_of, checkpoints(a.workdir / "checkpoints")), default=None)
    text = card(a.workdir, a.repository.rpartition("/")[2], a.license, default().to_dict(), step)
    if a.print:
        command.say(text)
        return
    api = HfApi(library_name="rlx")
    try:
        address = api.create_repo(a.repository, private=not a.public, exist_ok=True)
        hf, adapter, name = a.workdir / "hf", a.workdir / "adapter", a.repository
        if adapter.is_dir():
            api.upload_folder(repo_id=name, folder_path=adapter, path_in_repo="adapter")
        api.upload_folder(repo_id=name, folder_path=hf, ignore_patterns="README.md")
        api.upload_file(repo_id=name, path_or_fileobj=text.encode(), path_in_repo="README.md")
    except Exception as error:  # the hub client raises its own, its HTTP library's and OS errors
        raise UserError(f"cannot push to {a.repository}: {user_code.words(error)}; check the name, "
                        "the network and $HF_TOKEN, which needs to write") from None  # fmt: skip
    command.say(address)


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
