"""Evaluations without a trainer: models × question sets, every sample kept, nothing done twice.

    OUT/settings.json              what was asked for; another evaluation does not continue it
    OUT/MODEL/SET.jsonl            every finished sample, appended as it comes
    OUT/MODEL/hf                   what a checkpoint was converted to
    OUT/results.json, table.txt    the table, with bootstrap intervals in the former

The fleet is the one of training: local servers, or those at `fleet.addresses`, which then serve
each model in turn.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.agents import from_command_line
from rlx.base import Group, Unavailable, UserError
from rlx.evaluation import benchmarks, scores
from rlx.evaluation.benchmarks import Benchmark
from rlx.evaluation.evaluator import Evaluator
from rlx.fleet import wire
from rlx.fleet.client import Fleet, Timeouts
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import client_tls
from rlx.launch.local import LocalServers, servers_plan
from rlx.launch.servers import RunningServers, servers_of
from rlx.launch.workdir_lock import make_directory, occupied
from rlx.model.directory import load_config, resolve
from rlx.observe.jsonl import append_jsonl, read_json, read_jsonl, set_aside, write_atomically
from rlx.rewards.reward_pool import RewardPool
from rlx.rewards.worker_process import WorkerLimits
from rlx.rollout.attempts import Skipped
from rlx.rollout.executor import group_seed
from rlx.run.export import checkpoint_to_hf
from rlx.run.inputs import load_tokenizer, patience, server_options
from rlx.train import checkpoint

CHUNK = 8  # samples a request: what an interruption may cost of a question
GREEDY = -1  # the sample number of the answer at temperature 0


@dataclass(frozen=True, slots=True)
class Options:
    """How questions are asked.

    Attributes:
      n_samples: sampled answers a question; 0: the greedy one only.
      temperature, top_p: of the sampled ones.
      pass_at, maj_at: the k of the columns.
      limit: questions of each set; 0: all.
      workflow: a workflow's or an agent's class, by name; empty: one turn, graded (RLVR).
      workflow_kwargs: of its constructor.
    """

    n_samples: int = 32
    temperature: float = 0.6
    top_p: float = 0.95
    pass_at: tuple[int, ...] = (8, 16)
    maj_at: tuple[int, ...] = ()
    limit: int = 0
    workflow: str = ""
    workflow_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns behind `dataset` and `num_questions`."""
        return scores.columns(self.pass_at, self.maj_at)


@dataclass(frozen=True, slots=True)
class Job:
    """One request: samples `first` … `first + count − 1` of a question, or its greedy answer."""

    index: int
    first: int
    count: int


def run(
    config: ConfigDict,
    models: Mapping[str, Path],
    sets: Sequence[tuple[Benchmark, Sequence[Mapping[str, Any]]]],
    options: Options,
    out: Path,
    show: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """Every model on every set; what OUT has already is not generated again.

    Args:
      config: of a run; `sampling.max_new_tokens` is the budget of an answer, `fleet`, `data` and
        `reward` are as in training.
      models: name → HF directory or checkpoint.
      show: told (what, finished, wanted) samples as they come.

    Returns:
      The rows of results.json: model, dataset and the columns of the table.

    Raises:
      UserError: OUT holds another evaluation, or a server, prompt or grader that cannot work.
    """
    scores.check_samples(options.n_samples, options.pass_at, options.maj_at)
    names = options.columns
    if not config.fleet.addresses and config.fleet.num_servers < 1:
        raise UserError("fleet.num_servers=0 without fleet.addresses; give one of them")
    token = wire.take_token(os.environ)
    with _own(out):
        settings = _settings(config, models, sets, options, out)
        directories = {name: directory_of(path, out / name) for name, path in models.items()}
        for directory in directories.values():
            _check_model(config, directory)
        write_atomically(out / "settings.json", json.dumps(settings, indent=2).encode())
        rows = []
        for model, directory in directories.items():
            files = {found.name: out / model / f"{found.name}.jsonl" for found, _ in sets}
            for path in files.values():
                set_aside(path, _is_sample)
            asked = []
            for found, questions in sets:
                if jobs := pending(files[found.name], len(questions), options.n_samples):
                    ask = _Asking(config, directory, found, options, files[found.name])
                    asked.append((ask, questions, jobs))
            servers = servers_of(
                config.fleet.addresses,
                directory,
                token=token,
                tls=client_tls(**config.fleet.tls),
                workdir=out / model,
                plan=servers_plan(
                    sorted(os.sched_getaffinity(0)), config.fleet.num_servers, config.fleet.threads
                ),
                **server_options(config),
            )
            limits = Timeouts.of(config.fleet, config.rollout.request_timeout_seconds)
            _ask_all(asked, servers, partial(_connect, servers, directory, limits), model, show)
            for found, questions in sets:
                row = summary(found.name, files[found.name], len(questions), options, names)
                rows.append({"model": model, **row})
                _write(out, rows, names)
        return rows


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """OUT is there and this process's alone; one made for nothing goes again."""
    made = not out.exists()
    make_directory(out, "--output")
    try:
        with occupied(out, "--output"):
            yield
    finally:
        with suppress(OSError):
            if made:
                out.rmdir()


def _is_sample(record: Mapping[str, Any]) -> bool:
    """Whether a line of a samples file has what the table is made of."""
    whole = all(isinstance(record.get(key), int) for key in ("index", "sample", "tokens"))
    answered = isinstance(record.get("answer", 0), str | None)
    return whole and answered and isinstance(record.get("reward"), int | float)


def pending(path: Path, questions: int, n_samples: int) -> list[Job]:
    """What a samples file does not have yet, a job for each request."""
    done = {(r["index"], r["sample"]) for r in read_jsonl(path) if "error" not in r}
    jobs = []
    for index in range(questions):
        if (index, GREEDY) not in done:
            jobs.append(Job(index, GREEDY, 1))
        for first in range(0, n_samples, CHUNK):
            count = min(CHUNK, n_samples - first)
            if any((index, first + i) not in done for i in range(count)):
                jobs.append(Job(index, first, count))
    return jobs


def summary(
    name: str, path: Path, questions: int, options: Options, names: Sequence[str]
) -> dict[str, Any]:
    """The table's row of one samples file, and how many questions have a sample that failed.

    Of two records of one sample the first counts, and one that failed not at all.
    """
    greedy: dict[int, dict] = {}
    samples: dict[int, dict[int, dict]] = {}
    for record in sorted(read_jsonl(path), key=lambda record: "error" in record):
        if record["sample"] == GREEDY:
            greedy.setdefault(record["index"], record)
        elif record["sample"] < options.n_samples:
            samples.setdefault(record["index"], {}).setdefault(record["sample"], record)
    found, failed = [], 0
    for index in range(questions):
        own = samples.get(index, {})
        ordered = [own[i] for i in sorted(own)]
        failed += any("error" in record for record in (greedy.get(index, {}), *ordered))
        found.append(
            scores.per_question(greedy.get(index), ordered, options.pass_at, options.maj_at)
        )
    return {**scores.row(name, found, names), "failed": failed}


def shortfall(rows: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """Return a line for each row of the table that has questions which failed."""
    return [
        f"{row['failed']} of {row['num_questions']} questions failed and count as wrong: see error "
        f"in {out / row['model'] / row['dataset']}.jsonl; the same command asks them again"
        for row in rows
        if row["failed"]
    ]


async def _connect(
    servers: LocalServers | RunningServers, directory: Path, limits: Timeouts
) -> Fleet:
    """Return the connected fleet; servers that ran before are given the model."""
    fleet = servers.fleet(limits=limits)
    try:
        await fleet.connect()
        if isinstance(servers, RunningServers):
            await fleet.publish(0, directory, "stream")
    except BaseException:
        await fleet.close()
        raise
    return fleet


def _ask_all(asked, servers: LocalServers | RunningServers, connect, model: str, show) -> None:
    """Asks one set after the other; graders import their libraries while something else goes on."""
    if not asked:
        return
    try:
        for ask, questions, _ in asked:
            ask.check(questions)
        asked[0][0].start()
        with servers:
            for index, (ask, questions, jobs) in enumerate(asked):
                for following, *_ in asked[index + 1 : index + 2]:
                    following.start()
                ask.all(connect, questions, jobs, model, show)
                ask.close()
    finally:
        for ask, *_ in asked:
            ask.close()


class _Asking:
    """One model, one set: a workflow, a grader, and the file that samples go to."""

    def __init__(self, config, directory, found: Benchmark, options: Options, path: Path):
        self._options, self._path, self._config, self._name = options, path, config, found.name
        reward = config.reward
        self._pool = RewardPool(
            found.reward, reward.workers, reward.timeout_seconds, WorkerLimits.of(reward)
        )
        self._tokenizer = load_tokenizer(directory)
        self._workflow, self._graded = from_command_line.build(
            options.workflow,
            options.workflow_kwargs,
            tokenizer=self._tokenizer,
            sampling=Sampling(),
            reward_pool=self._pool,
            n=1,
            system_prompt=config.data.system_prompt,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_model_len=load_config(directory).max_position,
            workers=reward.workers,
            limits=WorkerLimits.of(config.agents),
            process_per_run=config.agents.process_per_run,
        )
        self._lock = threading.Lock()

    def check(self, questions: Sequence[Mapping[str, Any]]) -> None:
        """Raises UserError for a question that is too long."""
        if check := getattr(self._workflow, "check", None):
            check(questions, self._name)

    def start(self) -> None:
        """Starts the graders, and returns at once."""
        if self._graded:
            self._pool.start()

    def close(self) -> None:
        """Ends the graders."""
        self._pool.close()

    def all(self, connect, questions, jobs: Sequence[Job], model: str, show) -> None:
        """Answers every job; a row that fails for good scores 0.

        Raises the first failure that is not one row's, after the others' samples are written.
        """
        wanted, done = sum(job.count for job in jobs), 0
        what = f"{model} {self._name}"
        c = self._config
        with Evaluator(
            connect,
            self._workflow,
            concurrency=c.rollout.max_concurrent_rollouts,
            patience=patience(c),
            timeout=c.rollout.request_timeout_seconds,
        ) as evaluator:
            show(what, 0, wanted)
            futures: list[Future[Group]] = []
            unkept: list[Exception] = []

            def finished(job: Job, future: Future) -> None:
                nonlocal done
                if future.cancelled():
                    return
                error, row = future.exception(), questions[job.index]
                if error and not _of_its_row(error):
                    return
                with self._lock:
                    try:
                        if error:
                            self._keep_failure(job, row, error)
                        else:
                            self._keep(job, row, future.result())
                    except Exception as error:  # a callback's would be lost
                        unkept.append(error)
                    done += job.count
                    show(what, done, wanted)

            for job in jobs:
                future = evaluator.submit(
                    questions[job.index],
                    n=job.count,
                    sampling=self._sampling(job),
                    group_id=job.index,
                    seed=group_seed(c.seed, job.index, job.first),
                )
                future.add_done_callback(partial(finished, job))
                futures.append(future)
            left = set(futures)
            while left:
                ended, left = wait(left, return_when=FIRST_EXCEPTION)
                for future in ended:
                    if (error := future.exception()) and not _of_its_row(error):
                        raise error
        if unkept:  # after the end of the thread that keeps them
            raise unkept[0]

    def _sampling(self, job: Job) -> Sampling:
        s = self._config.sampling
        fixed = Sampling(max_new_tokens=s.max_new_tokens, stop=tuple(s.stop), temperature=0.0)
        if job.first == GREEDY:
            return fixed
        return dataclasses.replace(
            fixed, temperature=self._options.temperature, top_p=self._options.top_p
        )

    def _keep(self, job: Job, row: Mapping[str, Any], group: Group) -> None:
        for i, parts in enumerate(from_command_line.samples(group, job.count)):
            found = from_command_line.record(parts, self._tokenizer)
            record = {
                "index": job.index,
                "sample": job.first + i if job.first != GREEDY else GREEDY,
                "question": row["question"],
                "answer_key": row.get("answer"),
                "answer": scores.ballot(found["completion"]),
                **found,
            }
            append_jsonl(self._path, record)

    def _keep_failure(self, job: Job, row: Mapping[str, Any], error: BaseException) -> None:
        for sample in range(job.first, job.first + job.count):
            record = {
                "index": job.index,
                "sample": sample,
                "question": row["question"],
                "answer_key": row.get("answer"),
                "answer": None,
                "completion": "",
                "reward": 0.0,
                "tokens": 0,
                "error": f"{type(error).__name__}: {error}",
            }
            append_jsonl(self._path, record)


def _of_its_row(error: BaseException) -> bool:
    """Whether a failure says nothing of other rows."""
    return isinstance(error, Skipped | UserError) and not isinstance(error, Unavailable)


def _check_model(config: ConfigDict, directory: Path) -> None:
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    model = load_config(directory)
    if model.value_head:
        raise UserError(f"{directory} values texts and writes none; give a language model")
    if longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + --max_gen_tokens = {longest} exceeds the context of "
            f"{directory}, {model.max_position} tokens; lower one of them"
        )


def directory_of(path: Path, out: Path) -> Path:
    """The HF directory of a model: `path` itself, or `out`/hf for a checkpoint, written once."""
    if not checkpoint.is_one(path):
        return path
    target = out / "hf"
    if not target.exists():  # it appears whole
        out.mkdir(parents=True, exist_ok=True)
        checkpoint_to_hf(path, target, "")
    return target


def named(sources: Sequence[str]) -> dict[str, Path]:
    """Models by a short name: the last part of their path that tells them apart.

    Args:
      sources: HF directories, hub names, checkpoints, or runs, whose newest checkpoint is meant.

    Raises:
      UserError: a source that is no model, or one given twice.
    """
    paths = {text: checkpoint.find(text) or resolve(text, "--models")
             for text in (source.strip() for source in sources)}  # fmt: skip
    if len(paths) < len(sources):
        raise UserError(f"--models={','.join(sources)} names a model twice; name each once")
    for depth in range(1, 64):
        names = {"-".join(Path(s.replace(":", "/")).parts[-depth:]): p for s, p in paths.items()}
        if len(names) == len(paths):
            return {name.strip("-/") or "model": path for name, path in names.items()}
    raise AssertionError("distinct paths have distinct names")


def _settings(config, models, sets, options: Options, out: Path) -> dict[str, Any]:
    """What settings.json shall say; raises UserError where OUT's says otherwise."""
    settings = {
        "models": {name: str(path.absolute()) for name, path in models.items()},
        "datasets": {found.name: [found.source, len(rows)] for found, rows in sets},
        "max_gen_tokens": config.sampling.max_new_tokens,
        "system_prompt": config.data.system_prompt,
        "seed": config.seed,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "workflow": options.workflow or None,
        "workflow_kwargs": dict(options.workflow_kwargs) or None,
    }
    path = out / "settings.json"
    # An evaluation that failed before it wrote anything claims nothing.
    if path.exists() and any((*out.glob("*/*.jsonl"), *out.glob("*/hf"))):
        before = read_json(path)
        for key in (key for key in settings if key not in ("models", "datasets")):
            if before.get(key) != settings[key]:
                raise UserError(
                    f"{out} holds an evaluation with {key}={before.get(key)!r}, this one has "
                    f"{settings[key]!r}; give another --output"
                )
        for key in ("models", "datasets"):
            for name, value in settings[key].items():
                if before.get(key, {}).get(name, value) != value:
                    raise UserError(
                        f"{out} holds {name} of {before[key][name]}, this one is {value}; give "
                        "another --output"
                    )
            settings[key] = {**before.get(key, {}), **settings[key]}
    return settings


def _write(out: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    write_atomically(out / "results.json", json.dumps(list(rows), indent=2).encode())
    write_atomically(out / "table.txt", (scores.text_table(rows, names) + "\n").encode())


def question_sets(
    text: str, reward: str, limit: int, question_key: str = "question"
) -> list[tuple[Benchmark, list[dict[str, Any]]]]:
    """The sets of `--datasets`, loaded; `question_key` is that of rows in a file.

    Raises:
      UserError: none, an unknown or unreachable one, or two of one name.
    """
    parts = [part.strip() for part in text.split(",")]
    found = [benchmarks.find(part, reward, question_key) for part in parts if part]
    if not found:
        raise UserError(f"--datasets={text!r} names none; give gsm8k,math_500 or a .jsonl path")
    names = [benchmark.name for benchmark in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--datasets names {name} twice; rename one of the files")
    return [(benchmark, benchmarks.rows(benchmark, limit)) for benchmark in found]
