"""Score models × question sets without a trainer: `python -m rlx.evaluate`.

Uses local servers, started for each model, or running ones, which load each model in turn. Every
sample is kept, and none is generated twice (rlx/evaluation/sample_files.py).
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import loading, named_workflow
from rlx.base import UserError, refuse
from rlx.cli.command import say
from rlx.cli.hangs import reported
from rlx.evaluation import sample_files, statistics
from rlx.evaluation.question_sets import BENCHMARKS, Benchmark
from rlx.evaluation.runner import Evaluator
from rlx.fleet import wire
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import client_tls
from rlx.launch.local import LocalServers, RunningServers, cpu_plan, servers_of
from rlx.model.directory import load_config
from rlx.rewards.reward_pool import RewardPool
from rlx.rewards.rewards import JUDGE, check_rows
from rlx.rollout.attempts import Skipped
from rlx.rollout.executor import group_seed
from rlx.rollout.images import RowImages
from rlx.rollout.teacher_scores import JudgeRewarded
from rlx.rollout.workflows import Prompts, Workflow
from rlx.run import allocate, flags
from rlx.run.export import directory_of
from rlx.run.room_options import RunOptions, agents_of, joining_of, judge_of, pool_of
from rlx.run.tokenizer_files import image_prompts, load_tokenizer
from rlx.run.watchdog import rollout_signs
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system.image_store import ImageStore
from rlx.system.jsonl import jsonable, read_jsonl, set_aside, write_atomically
from rlx.system.workdir_lock import lock_workdir

Show = Callable[[str, int, int], None]  # (what, samples finished, samples wanted)


def eval_options(config: ConfigDict, values: Any) -> sample_files.QuestionOptions:
    """Return an evaluation's options by its flags, and write its token budget into `config`."""
    number = partial(flags.number, values)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    budget = number("max_gen_tokens", int, config.sampling.max_new_tokens)
    with config.unlocked():
        config.sampling.max_new_tokens, config.eval.max_new_tokens = budget, 0
    n_samples = number("n_samples", int, 32)
    workflow, kwargs = loading.workflow_of(values, config.rollout)
    return sample_files.QuestionOptions(
        n_samples=n_samples, temperature=number("temperature", float, 0.6),
        top_p=number("top_p", float, 0.95),
        pass_at=number("pass_at", numbers, (8, 16)) if n_samples else (),
        maj_at=number("maj_at", numbers, ()) if n_samples else (),
        workflow=workflow, workflow_kwargs=kwargs,
        images=RowImages(ImageStore(), config.data.image_key, config.data.image_hosts),
    )  # fmt: skip


def score_models(
    config: ConfigDict,  # config of a run; `sampling.max_new_tokens` is the budget of an answer
    models: Mapping[str, Path],  # name → HF directory or checkpoint
    sets: Sequence[tuple[Benchmark, Sequence[Mapping[str, Any]]]],  # question sets with their rows
    how: sample_files.QuestionOptions,
    out: Path,
    show: Show,  # called with the progress of each set
) -> list[dict[str, Any]]:
    """Generate the samples that `out` lacks, grade them, write and return rows of results.json.

    UserError if `out` holds another evaluation, or a server, prompt or grader cannot work.
    """
    statistics.check_samples(how.n_samples, how.pass_at, how.maj_at)
    files = (b for b, _ in sets if b.reward == config.reward.name and b.name not in BENCHMARKS)
    for b in files if config.reward.terms else ():
        if named_workflow.uses_rewards(b.workflow or how.workflow):
            _say(f"reward.terms are for training: {b.name} is graded by reward.name={b.reward}")
    options, template = RunOptions.of(config), config.data.chat_template
    token = wire.take_token(os.environ)
    judge = judge_of(config) if any(b.reward == JUDGE for b, _ in sets) else None
    dtype = options.servers["dtype"]
    with lock_workdir(out, "--output"):
        fields = {
            "max_gen_tokens": options.sampling.max_new_tokens,
            "system_prompt": config.data.system_prompt, "seed": config.seed,
            "chat_template": template or None, "guide": options.sampling.guide or None,
            "stop": [*options.sampling.stop] or None, "judge": judge and judge[0].settings,
            "dtype": dtype if dtype != "float32" else None,
        }  # fmt: skip
        paths = {name: str(path.absolute()) for name, path in models.items()}
        sources = {b.name: [b.source, len(rows), b.reward] for b, rows in sets}
        settings = sample_files.settings(how, paths, sources, fields, out)
        scored = dict[str, _Model]()
        for name, path in models.items():
            place = directory_of(path, out / name)
            scored[name] = _Model(config, options, how, place, out / name)
        for model in scored.values():
            model.check()
        write_atomically(out / "settings.json", json.dumps(settings, indent=2).encode())
        table = []
        for name, model in scored.items():
            if todo := [job for benchmark, rows in sets if (job := model.job_of(benchmark, rows))]:
                with model.servers(token) as servers:
                    for job in todo:
                        model.ask(servers, job, partial(show, f"{name} {job.name}"))
            for benchmark, rows in sets:
                path = model.out / f"{benchmark.name}.jsonl"
                row = sample_files.summary(benchmark.name, path, len(rows), how)
                table.append({"model": name, **row})
                sample_files.write_table(out, table, how.columns)
        return table


def _say(text: str) -> None:
    say(text, sys.stderr)  # stdout has the table


@dataclass(frozen=True, eq=False)
class _Job:
    """The samples that a question set lacks, with their workflow, grader and file."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    samples: Sequence[sample_files.SampleRange]
    path: Path
    workflow: Workflow
    pool: RewardPool | None  # not started; None if the workflow grades


@dataclass(eq=False)
class _Model:
    """A model to score: its HF directory, and the directory `out` of its samples."""

    config: ConfigDict
    options: RunOptions
    how: sample_files.QuestionOptions
    directory: Path
    out: Path

    def check(self) -> None:
        """Raise UserError unless the model can answer within its context."""
        model, longest = load_config(self.directory), self.options.longest
        refuse((
            (model.value_head,
             f"{self.directory} is a reward model, which generates no text; give a language model"),
            (longest > model.max_position,
             f"data.max_prompt_tokens + --max_gen_tokens = {longest} exceeds the context of "
             f"{self.directory}, {model.max_position} tokens; lower one of them"),
        ))  # fmt: skip

    @cached_property
    def prompts(self) -> Prompts:
        """Return what renders questions for the model."""
        data = self.config.data
        tokenizer = load_tokenizer(self.directory, data.system_prompt, data.chat_template)
        return Prompts(
            tokenizer, system_prompt=data.system_prompt, max_prompt_tokens=data.max_prompt_tokens,
            max_model_len=load_config(self.directory).max_position,
            images=image_prompts(self.directory, tokenizer, self.how.images.store),
        )  # fmt: skip

    def job_of(self, benchmark: Benchmark, rows: Sequence[Mapping[str, Any]]) -> _Job | None:
        """Return the samples that a set lacks, or None; UserError if its rows are unfit."""
        config, how, path = self.config, self.how, self.out / f"{benchmark.name}.jsonl"
        name = benchmark.workflow or how.workflow
        if graded := named_workflow.uses_rewards(name):
            check_rows(benchmark.reward, rows)
        set_aside(path, sample_files.is_sample)
        texts = [jsonable([row["question"], row.get("answer")]) for row in rows]
        for record in read_jsonl(path):  # the file of rows may have been corrected
            number = record["index"]
            if texts[number : number + 1] != [[record.get("question"), record.get("answer_key")]]:
                what = f"{path} has an answer to another row {number + 1} of {benchmark.name}"
                raise UserError(f"{what}; give another --output")
        if not (samples := sample_files.pending(path, len(rows), how.n_samples)):
            return None
        if config.data.overlong == "error":  # else such rows fail and count as wrong
            for index, row in enumerate(rows):
                self.prompts.check(row, f"row {index + 1} of {benchmark.name}")
        judge = judge_of(config) if benchmark.reward == JUDGE else None
        pool = pool_of(config, {} if judge else benchmark.reward, config.reward.workers)
        sandbox = SandboxOptions(**config.sandbox)
        kwargs = {} if benchmark.workflow else how.workflow_kwargs
        factory = named_workflow.NamedWorkflow(name, kwargs, self.prompts, Sampling(), 1, sandbox)
        workflow = factory.build(pool, replace(agents_of(config), question_key="question"))
        factory.try_out(rows[0])
        if judge:  # no verdict is needed twice: samples are kept with theirs
            workflow = JudgeRewarded(workflow, *judge)
        return _Job(benchmark.name, rows, samples, path, workflow, pool if graded else None)

    def servers(self, token: str | None) -> LocalServers | RunningServers:
        """Return servers of the model, or running ones."""
        config, fleet = self.config, self.config.fleet
        shares = allocate.share(config, allocate.gpus())
        cores = sorted(os.sched_getaffinity(0))
        plan = cpu_plan(cores, fleet.num_servers, fleet.threads, trains=False)
        return servers_of(
            fleet.addresses, self.directory, token=token, tls=client_tls(**fleet.tls),
            workdir=self.out, plan=plan, gpus=shares.servers if shares else (),
            joining=joining_of(config), on_message=_say, **self.options.servers,
        )  # fmt: skip

    def ask(
        self, servers: LocalServers | RunningServers, job: _Job, show: Callable[[int, int], None]
    ) -> None:
        """Keep all missing samples of a set, then raise the first failure of all rows."""
        options, how, images = self.options, self.how, self.how.images.store
        fleet = servers.fleet(limits=options.limits, on_message=_say, image=images.get)

        async def connect() -> Fleet:
            try:
                await fleet.connect()
                # Others than ours may have other weights.
                if isinstance(servers, RunningServers) or self.config.fleet.join:
                    await fleet.publish(0, self.directory, "stream")
            except BaseException:
                await fleet.close()
                raise
            return fleet

        def submit(span: sample_files.SampleRange):
            greedy, index = span.first == sample_files.GREEDY, span.index
            temperature, top_p = (0.0, 1.0) if greedy else (how.temperature, how.top_p)
            sampling = replace(options.evaluation, temperature=temperature, top_p=top_p, seed=None)
            return evaluator.submit(
                job.rows[index], n=span.count, group_id=index, sampling=sampling,
                seed=group_seed(self.config.seed, index, span.first),
            )  # fmt: skip

        slots = self.config.fleet.slots * max(1, self.config.fleet.num_servers)
        evaluator = Evaluator(
            connect, job.workflow, patience=options.patience, timeout=options.limits.request,
            concurrency=self.config.rollout.max_concurrent_rollouts or slots, say=_say,
        )  # fmt: skip
        done, total, failure = 0, sum(span.count for span in job.samples), None
        with ExitStack() as stack:
            if job.pool:
                stack.callback(job.pool.close)
                job.pool.start()  # its workers import libraries meanwhile
            stack.enter_context(evaluator)
            signs = partial(rollout_signs, evaluator.runner.executor, evaluator.loop, fleet)
            stack.enter_context(reported(signs, _say, self.out / "stacks.txt"))
            show(0, total)
            futures = {submit(span): span for span in job.samples}
            for future in as_completed(futures):
                span, error = futures[future], future.exception()
                if error and not isinstance(error, Skipped):
                    failure = failure or error
                    continue
                group = error.reason if isinstance(error, Skipped) else future.result()
                tokenizer = self.prompts.tokenizer
                sample_files.keep(job.path, span, job.rows[span.index], group, tokenizer)
                done += span.count
                show(done, total)
            if failure:
                raise failure
