"""`rlx k8s --config=FILE --image=IMAGE --claim=NAME:/PATH --workdir=/PATH/RUN > run.yaml`.

Prints manifests for `kubectl apply -f`: a Service, and a Job of scheduler.nodes pods with
scheduler.gpus_per_node GPUs each. --ray prints KubeRay's RayJob instead.
"""

import re
import sys
from itertools import pairwise
from pathlib import Path

from rlx.base import UserError
from rlx.cli import command
from rlx.config import check
from rlx.doctor import failures
from rlx.run import flags
from rlx.run.allocate import apply_allocation
from rlx.train.train_options import AUTO

OWN = ("--image", "--claim", "--name", "--workdir")


def main() -> int:
    """Check the config and print its manifests."""
    config, values = flags.parse(
        sys.argv,
        switches={"ray": "a RayJob of KubeRay"},
        image="container image with rlx, bash and openssl",
        claim="PersistentVolumeClaim that all pods mount, and where: NAME:/PATH",
        workdir="directory of the run, below that path",
        name="of the run; default: the last part of --workdir",
    )
    claim, _, path = values.claim.partition(":")
    workdir = Path(values.workdir)
    if not values.image or not claim or not path or not workdir.is_relative_to(path):
        raise UserError(
            f"--image={values.image} --claim={values.claim} --workdir={workdir}: give an image, a "
            "claim as NAME:/PATH, and a directory below /PATH"
        )
    if config.allocation_mode == AUTO:
        raise UserError("allocation_mode=auto knows only GPUs of this machine; set what `rlx plan "
                        "--gpus=N --gpu=KIND` prints")  # fmt: skip
    name = re.sub("[^a-z0-9-]+", "-", (values.name or workdir.name).lower()).strip("-")
    if not re.fullmatch("[a-z].{,50}", name):
        what = f"Kubernetes takes no name {name!r}; give --name, a letter first and at most 51"
        raise UserError(f"{what} characters")
    from rlx.run import kubernetes

    config = apply_allocation(config)
    check(config)
    args = [a for before, a in pairwise(sys.argv)  # a value may be a word of its own
            if before not in OWN and a.partition("=")[0] not in (*OWN, "--ray")]  # fmt: skip
    make = kubernetes.ray_job if values.ray else kubernetes.manifests
    pods = kubernetes.Pods(name, values.image, claim, path)
    command.say(kubernetes.text(make(config, workdir, args, pods)).rstrip())
    return 0


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
