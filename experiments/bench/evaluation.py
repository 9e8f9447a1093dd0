"""Compare the tokens/s of rlx.evaluate on vLLM with vLLM's own offline LLM.generate.

    python -m experiments.bench.evaluation                       # tiny, about ten minutes
    python -m experiments.bench.evaluation --model=0.5b --questions=16 --samples=8 --most=64
    python -m experiments.bench.evaluation --dry                 # a minute; figures mean nothing

Both answer the same prompts: one greedy completion and `samples` at temperature 0.6 and top-p 0.95
per question, of at most `most` tokens. rlx's side is all of `rlx.run.score_models`, from the first
request to the last sample in its file. It includes gRPC, seeds, behaviour logprobs and grading.
vLLM's side is one `LLM.generate` call with the same engine settings and `n` samples per prompt,
without grading or files. Samples differ, so each side's own tokens are counted. Both have the same
two cores: rlx's server is pinned to the second, vLLM's two processes may use both. They take turns;
the share is the median over rounds of the quotient.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from experiments.bench import process, vllm_workers
from experiments.bench.vllm_fleet import spread
from rlx.config import default
from rlx.evaluation.question_sets import BENCHMARKS
from rlx.evaluation.sample_files import QuestionOptions
from rlx.launch.local import CpuPlan, LocalServers
from rlx.model.directory import load_config
from rlx.rollout import arithmetic
from rlx.rollout.workflows import encode, render
from rlx.run.score_models import score_models
from rlx.run.tokenizer_files import load_tokenizer
from rlx.system.jsonl import read_jsonl

TARGET = 0.95


class Clock:
    """Collects the seconds from the first request to the last sample, which `show` reports."""

    def show(self, what: str, done: int, wanted: int) -> None:
        if done == 0:
            self._start = time.perf_counter()
        self.seconds = time.perf_counter() - self._start


def ours(config, model: Path, rows, asked, out: Path) -> float:
    """Return tokens/s of one evaluation through the fleet."""
    clock = Clock()
    sets = [(BENCHMARKS["arithmetic"], rows)]
    score_models(config, {"model": model}, sets, asked, out, clock.show)
    samples = list(read_jsonl(out / "model" / "arithmetic.jsonl"))
    assert len(samples) == len(rows) * (1 + asked.n_samples)
    return sum(sample["tokens"] for sample in samples) / clock.seconds


def theirs(rival: vllm_workers.Rival, prompts, asked, most: int) -> float:
    """Return tokens/s of the same requests in one call."""
    greedy = [[ids, 1, 0.0, 1.0, None, most] for ids in prompts]
    drawn = [[ids, asked.n_samples, asked.temperature, asked.top_p, None, most] for ids in prompts]
    tokens, seconds = rival.ask(greedy + drawn)
    return tokens / seconds


def main() -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--model", default="tiny", choices=vllm_workers.MODELS)
    p.add_argument("--cores", default="0,1", help="client, engine; the rival has both")
    p.add_argument("--slots", type=int, default=64, help="sequences decoded together")
    p.add_argument("--questions", type=int, default=24)
    p.add_argument("--samples", type=int, default=32)
    p.add_argument("--most", type=int, default=128, help="new tokens")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--scratch", default="", help="where the large model is kept")
    p.add_argument("--dry", action="store_true", help="as small as it gets")
    args = p.parse_args()
    if args.dry:
        args.rounds, args.questions, args.samples, args.most = 1, 2, 8, 8
    cores = process.cores_of(args.cores)
    os.sched_setaffinity(0, cores)
    dtype = "float32" if args.model == "tiny" else "bfloat16"
    engine = {"slots": args.slots, "max_model_len": args.most + 64, "dtype": dtype}
    config = default()
    config.data.max_prompt_tokens, config.sampling.max_new_tokens = 64, args.most
    config.rollout.max_concurrent_rollouts = args.slots
    asked = QuestionOptions(n_samples=args.samples, pass_at=(), maj_at=())
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(args.scratch or directory)
        with vllm_workers.model_dir(args.model, scratch) as model:
            plan = CpuPlan(tuple(cores), (tuple(cores),))
            stop = list(load_config(model).eos_token_ids)
            log = Path(directory) / "rival.log"
            both = ",".join(map(str, cores))
            with (
                LocalServers(model, workdir=Path(directory), plan=plan, engine="vllm", **engine) as
                local,
                vllm_workers.Rival("evaluate", model, both, log, stop=stop, **engine) as rival,
            ):  # fmt: skip
                rival.ask()
                config.fleet.addresses = tuple(local.wait())
                tokenizer, rounds = load_tokenizer(model), []
                for number in range(-1, args.rounds):  # the first one is a warm-up
                    os.environ["RLX_FLEET_TOKEN"] = local.token  # every evaluation uses it
                    rows = arithmetic.problems(number + 1, "train", args.questions)
                    prompts = [encode(tokenizer, render(tokenizer, r["question"])) for r in rows]
                    out = Path(directory) / f"round-{number}"
                    sides = {
                        "rlx": lambda rows=rows, out=out: ours(config, model, rows, asked, out),
                        "LLM": lambda prompts=prompts: theirs(rival, prompts, asked, args.most),
                    }
                    names = list(sides)[:: 1 if number % 2 else -1]
                    rounds.append({name: sides[name]() for name in names})
    rounds = rounds[1:]
    shares = [r["rlx"] / r["LLM"] for r in rounds]
    print(
        f"{args.model}, {dtype}, {args.questions} questions x (1 + {args.samples}) answers of at "
        f"most {args.most} tokens, {args.slots} sequences, {args.rounds} rounds; load average "
        f"{os.getloadavg()[0]:.1f}\n\n"
        "| rlx.evaluate, tokens/s | LLM.generate | share | target |\n|---|---|---|---|\n"
        f"| {spread([r['rlx'] for r in rounds])} | {spread([r['LLM'] for r in rounds])} "
        f"| {process.median_spread(shares)} | {TARGET} |"
    )


if __name__ == "__main__":
    main()
