"""Write a run's manifests for Kubernetes from the plan that Slurm's jobs have too. Pure.

    Service  without an address of its own: its pods are found as NAME-0.NAME, NAME-1.NAME, …
    Job      indexed: pod i is host i of the plan, and starts that host's processes

All pods see one volume. Pod 0 writes the servers' token and certificate there, and the other pods
wait for them. The pods end with the trainer. Kubernetes restarts what fails, and the trainer then
resumes its last checkpoint.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import yaml
from ml_collections import ConfigDict

from rlx.launch import slurm
from rlx.launch.processes import Process, addresses
from rlx.run.scheduler import RETRIES, processes_of, until_weights

_PORT = 20_000
_TEMPLATE = slurm.TEMPLATE.with_name("kubernetes_pod.sh")
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pods:
    """Settings that all pods of a run share."""

    name: str  # of the run
    image: str
    claim: str  # PersistentVolumeClaim of the volume that all see
    path: str  # where they see it

    def spec(self, gpus: int, **container: Any) -> Manifest:
        """Return the spec of a pod with one container."""
        container |= {
            "name": "rlx", "image": self.image, "workingDir": self.path,
            # HF_TOKEN, WANDB_API_KEY and the like
            "envFrom": [{"secretRef": {"name": "rlx", "optional": True}}],
            "volumeMounts": [{"name": "shared", "mountPath": self.path},
                             {"name": "memory", "mountPath": "/dev/shm"}],
        }  # fmt: skip
        if gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        volumes = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": self.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # of NCCL and torch
        ]
        return {"containers": [container], "volumes": volumes}


def manifests(
    config: ConfigDict, workdir: Path, flags: Sequence[str], pods: Pods
) -> list[Manifest]:
    """Return the Service and the Job of an allocated config and the user's flags; or UserError."""
    s, name = config.scheduler, pods.name
    labels, root = {"app": "rlx", "run": name}, workdir / "k8s" / token_hex(4)
    hosts = {f"{name}-{i}.{name}": [*map(str, range(s.gpus_per_node))] for i in range(s.nodes)}
    path = config.model.path  # a name is for the pods to resolve
    model = Path(path).absolute() if Path(path).is_dir() else path
    plan = processes_of(config, workdir, flags, hosts, root, _PORT, "python3", False, model)
    script = _script(plan, list(hosts), root, config, until_weights(config, workdir))
    retries = RETRIES if s.retries < 0 else s.retries
    pod = pods.spec(s.gpus_per_node, command=["bash", "-c", script]) | {
        "subdomain": name, "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": s.grace_seconds,
    }  # fmt: skip
    job = {
        "completions": s.nodes, "parallelism": s.nodes, "completionMode": "Indexed",
        "backoffLimit": (retries + 1) * s.nodes,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }  # fmt: skip
    # Pods look each other up before they are ready.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    about = {"name": name, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": job},
    ]


def ray_job(config: ConfigDict, workdir: Path, flags: Sequence[str], pods: Pods) -> list[Manifest]:
    """Return KubeRay's RayJob of a run: a Ray cluster that lives as long as its command."""
    s, extra = config.scheduler, (f"--workdir={workdir}", "--config.scheduler.type=ray")
    command = ("python3", "-m", "rlx.main", *flags, *extra)
    group = {"rayStartParams": {}, "template": {"spec": pods.spec(s.gpus_per_node)}}
    cluster: Manifest = {"headGroupSpec": group}
    if s.nodes > 1:
        more = {"groupName": "workers", "replicas": s.nodes - 1}
        cluster["workerGroupSpecs"] = [more | group]
    spec = {
        "entrypoint": shlex.join(command), "shutdownAfterJobFinishes": True,
        "backoffLimit": 0,  # the command retries by itself
        "rayClusterSpec": cluster,
    }  # fmt: skip
    about = {"name": pods.name}
    return [{"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}]


def text(documents: Sequence[Manifest]) -> str:
    """Return manifests as YAML, scripts as blocks of lines."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1 << 16)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, "|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _script(
    plan: Sequence[Process], hosts: Sequence[str], root: Path, config: ConfigDict, ready: str
) -> str:
    """Return the script of bash that all pods run, each with its own index."""
    started = dict[str, list[str]]()
    for p in plan:
        words = [*(f"{k}={v}" for k, v in p.env.items()), *p.argv]
        env = f"env {shlex.join(words)}"
        run, sign = (env, "") if p.role == "trainer" else (f"{{ {ready}again {env}; }}", "-")
        run = f"  {run} &\n  {p.role}s+=({sign}$!)"
        started.setdefault(p.host, []).append(run)
    cases = ("\n".join((f"{i})", *started.get(host, ()), "  ;;")) for i, host in enumerate(hosts))
    values = {
        "root": shlex.quote(str(root)), "restarts": str(config.fleet.max_restarts),
        "pre_commands": "\n".join(config.scheduler.pre_commands), "hosts": shlex.join(hosts),
        "addresses": shlex.join(addresses(plan)) or "''", "processes": "\n".join(cases),
    }  # fmt: skip
    return slurm.render(_TEMPLATE.read_text(), values, str(_TEMPLATE))
