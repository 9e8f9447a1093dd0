"""Score models × question sets without a trainer: `python -m rlx.evaluate`.

Uses local servers, started for each model, or running ones, which load each model in turn. Every
sample is kept, and none is generated twice (rlx/evaluation/sample_files.py).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import loading, named_workflow
from rlx.agents.named_workflow import NamedWorkflow
from rlx.base import UserError
from rlx.cli.command import say
from rlx.evaluation import sample_files, statistics
from rlx.evaluation.question_sets import Benchmark
from rlx.evaluation.runner import Evaluator
from rlx.evaluation.sample_files import GREEDY, Asked, SampleRange
from rlx.fleet import wire
from rlx.fleet.client import Fleet, Timeouts
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import client_tls
from rlx.launch.local import LocalServers, RunningServers, servers_of, servers_plan
from rlx.model.directory import load_config
from rlx.option import read_options
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.attempts import Skipped
from rlx.rollout.executor import group_seed
from rlx.rollout.workflows import Prompts, Workflow
from rlx.run import allocate, flags
from rlx.run.export import directory_of
from rlx.run.room_options import (
    agents_of,
    has_servers,
    joining_of,
    patience,
    pool_of,
    server_options,
)
from rlx.run.tokenizer_files import load_tokenizer
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system.jsonl import set_aside, write_atomically
from rlx.system.workdir_lock import lock_workdir, make_directory

Show = Callable[[str, int, int], None]  # (what, samples finished, samples wanted)


def eval_options(config: ConfigDict, values: Any) -> Asked:
    """Return the options of an evaluation, and write its token budget into `config`.

    Args:
      values: flags of rlx.evaluate; empty ones have their defaults.
    """
    number = partial(flags.number, values)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    budget = number("max_gen_tokens", int, config.sampling.max_new_tokens)
    with config.unlocked():
        config.sampling.max_new_tokens, config.eval.max_new_tokens = budget, 0
    n_samples = number("n_samples", int, 32)
    workflow, kwargs = loading.workflow_of(values, config.rollout)
    return Asked(
        n_samples=n_samples,
        temperature=number("temperature", float, 0.6),
        top_p=number("top_p", float, 0.95),
        pass_at=number("pass_at", numbers, (8, 16)) if n_samples else (),
        maj_at=number("maj_at", numbers, ()) if n_samples else (),
        workflow=workflow,
        workflow_kwargs=kwargs,
    )


def score_models(
    config: ConfigDict,
    models: Mapping[str, Path],
    sets: Sequence[tuple[Benchmark, Sequence[Mapping[str, Any]]]],
    asked: Asked,
    out: Path,
    show: Show,
) -> list[dict[str, Any]]:
    """Generate the samples that `out` lacks, grade them, and write the table.

    Args:
      config: config of a run; `sampling.max_new_tokens` is the budget of an answer.
      models: name → HF directory or checkpoint.
      show: called with the progress of each set.

    Returns:
      rows of results.json: model, dataset, columns of the table, failed.

    Raises:
      UserError: `out` holds another evaluation, or a server, prompt or grader cannot work.
    """
    statistics.check_samples(asked.n_samples, asked.pass_at, asked.maj_at)
    if not has_servers(config):
        raise UserError("fleet.num_servers=0 without fleet.addresses; give one of them")
    token, template = wire.take_token(os.environ), config.data.chat_template
    with _locked(out):
        settings = sample_files.settings(
            asked,
            {name: str(path.absolute()) for name, path in models.items()},
            {found.name: [found.source, len(rows)] for found, rows in sets},
            {
                "max_gen_tokens": config.sampling.max_new_tokens,
                "system_prompt": config.data.system_prompt,
                "seed": config.seed,
                **({"chat_template": template} if template else {}),
            },
            out,
        )
        directories = {name: directory_of(path, out / name) for name, path in models.items()}
        for directory in directories.values():
            _check_model(config, directory)
        write_atomically(out / "settings.json", json.dumps(settings, indent=2).encode())
        table = []
        for model, directory in directories.items():
            todo = []
            for found, rows in sets:
                path = out / model / f"{found.name}.jsonl"
                set_aside(path, sample_files.is_sample)
                if samples := sample_files.pending(path, len(rows), asked.n_samples):
                    todo.append(_set_of(config, directory, found, rows, samples, path, asked))
            if todo:
                with _servers(config, directory, out / model, token) as servers:
                    for one in todo:
                        _ask(config, directory, servers, one, asked, f"{model} {one.name}", show)
            for found, rows in sets:
                path = out / model / f"{found.name}.jsonl"
                row = sample_files.summary(found.name, path, len(rows), asked)
                table.append({"model": model, **row})
                sample_files.write_table(out, table, asked.columns)
        return table


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Create and lock `out`; remove it again if it stays empty."""
    made = not out.exists()
    make_directory(out, "--output")
    try:
        with lock_workdir(out, "--output"):
            yield
    finally:
        with suppress(OSError):
            if made:
                out.rmdir()


def _check_model(config: ConfigDict, directory: Path) -> None:
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    model = load_config(directory)
    if model.value_head:
        raise UserError(
            f"{directory} is a reward model, which generates no text; give a language model"
        )
    if longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + --max_gen_tokens = {longest} exceeds the context of "
            f"{directory}, {model.max_position} tokens; lower one of them"
        )


@dataclass(frozen=True, eq=False)
class _Set:
    """A question set with its missing samples, their workflow, grader and file."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[SampleRange]
    path: Path
    tokenizer: Any
    workflow: Workflow
    pool: RewardPool | None  # not started; None if the workflow grades


def _set_of(
    config: ConfigDict,
    directory: Path,
    found: Benchmark,
    rows: Sequence[Mapping[str, Any]],
    samples: Sequence[SampleRange],
    path: Path,
    asked: Asked,
) -> _Set:
    """Return a set with its workflow; raise UserError if a question is too long."""
    options = config.data
    tokenizer = load_tokenizer(directory, options.system_prompt, options.chat_template)
    prompts = Prompts(
        tokenizer, system_prompt=options.system_prompt, max_prompt_tokens=options.max_prompt_tokens,
        max_model_len=load_config(directory).max_position,
    )  # fmt: skip
    if options.overlong == "error":  # else such rows fail and count as wrong
        for index, row in enumerate(rows):
            prompts.check(row, f"row {index + 1} of {found.name}")
    pool = pool_of(config, found.reward, config.reward.workers)
    agents = replace(agents_of(config), question_key="question")
    sandbox = SandboxOptions(**config.sandbox)
    named = NamedWorkflow(asked.workflow, asked.workflow_kwargs, prompts, Sampling(), 1, sandbox)
    workflow = named.build(pool, agents)
    named.try_out(rows[0])
    graded = named_workflow.uses_rewards(asked.workflow)
    return _Set(found.name, rows, samples, path, tokenizer, workflow, pool if graded else None)


def _say(text: str) -> None:
    say(text, sys.stderr)  # stdout has the table


def _servers(
    config: ConfigDict, directory: Path, workdir: Path, token: str | None
) -> LocalServers | RunningServers:
    fleet, shares = config.fleet, allocate.share(config, allocate.gpus())
    plan = servers_plan(sorted(os.sched_getaffinity(0)), fleet.num_servers, fleet.threads)
    return servers_of(
        fleet.addresses, directory, token=token, tls=client_tls(**fleet.tls), workdir=workdir,
        plan=plan, gpus=shares.servers if shares else (), joining=joining_of(config),
        on_message=_say, **server_options(config),
    )  # fmt: skip


def _ask(
    config: ConfigDict,
    directory: Path,
    servers: LocalServers | RunningServers,
    one: _Set,
    asked: Asked,
    what: str,
    show: Show,
) -> None:
    """Generate and keep every missing sample of a set; a row that keeps failing scores 0.

    Raises the first failure that concerns all rows, after the other samples are written.
    """
    seconds = config.rollout.request_timeout_seconds
    limits = read_options(Timeouts, config.fleet, request=seconds)
    fleet = servers.fleet(limits=limits, on_message=_say)

    async def connect() -> Fleet:
        try:
            await fleet.connect()
            if isinstance(servers, RunningServers):  # which may have other weights
                await fleet.publish(0, directory, "stream")
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def submit(each: SampleRange):
        greedy = each.first == GREEDY
        sampling = Sampling(
            temperature=0.0 if greedy else asked.temperature,
            top_p=1.0 if greedy else asked.top_p,
            max_new_tokens=config.sampling.max_new_tokens,
            stop=tuple(config.sampling.stop),
        )
        seed = group_seed(config.seed, each.index, each.first)
        return evaluator.submit(
            one.rows[each.index], n=each.count, sampling=sampling, group_id=each.index, seed=seed
        )

    concurrency = config.rollout.max_concurrent_rollouts
    evaluator = Evaluator(
        connect, one.workflow, concurrency=concurrency, patience=patience(config), timeout=seconds
    )
    done, wanted, ended = 0, sum(each.count for each in one.samples), None
    if one.pool:
        one.pool.start()  # its workers import libraries while the first answers are generated
    try:
        with evaluator:
            show(what, 0, wanted)
            futures = {submit(each): each for each in one.samples}
            for future in as_completed(futures):
                each, error = futures[future], future.exception()
                if error and not isinstance(error, Skipped):
                    ended = ended or error
                    continue
                group = error.reason if isinstance(error, Skipped) else future.result()
                sample_files.keep(one.path, each, one.rows[each.index], group, one.tokenizer)
                done += each.count
                show(what, done, wanted)
            if ended:
                raise ended
    finally:
        if one.pool:
            one.pool.close()
