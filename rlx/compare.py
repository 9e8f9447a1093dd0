"""`python -m rlx.compare --model=DIR --engine=vllm`: an engine's logprobs against rlx's and HF's.

One local server, or the one at --address, completes prompts. rlx's decoder scores its tokens, and
transformers does too if torch is installed. Exit status 1: they differ.
"""

from rlx.cli import command
from rlx.doctor import failures
from rlx.fleet.requests import Sampling
from rlx.model.directory import resolve

DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Print the table; return 0 when every pair agrees."""
    p = command.Parser("rlx.compare", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory or hub name")
    p.add_argument("--engine", default="vllm", choices=("jax", "vllm"))
    running = "host:port of a running server of this model"
    p.add_argument("--address", default="", dest="servers", help=running)
    p.add_argument("--tls", default="", help="of --address: ca.pem, or ca.pem,cert.pem,key.pem")
    p.add_argument("--prompts", default="", help=".jsonl with `question`, or text, a prompt a line")
    p.add_argument("--count", type=command.number(1), default=16, help="prompts at most")
    p.add_argument("--max-new-tokens", type=command.number(1), default=64)
    p.add_argument("--temperature", type=command.number(0, float), default=1.0)
    p.add_argument("--top-p", type=command.number(1e-6, float, 1), default=1.0)
    p.add_argument("--top-k", type=command.number(0), default=0, help="0: off")
    p.add_argument("--dtype", default="float32", choices=DTYPES, help="engine's")
    p.add_argument("--trainer-dtype", default="float32", choices=DTYPES, help="rlx's and HF's")
    nats = command.number(0, float)
    p.add_argument("--max-delta", type=nats, default=0.0, help="nats; 0: by the dtypes")
    p.add_argument("--mean-delta", type=nats, default=0.0, help="nats; 0: by the dtypes")
    a = p.parse_args()
    from rlx.mismatch import compare_table
    from rlx.run.serving import fleet_of
    from rlx.run.tokenizer_files import read_prompts
    from rlx.system.image_store import ImageStore

    model, store = resolve(a.model, "--model"), ImageStore()
    prompts = read_prompts(a.prompts, model, a.count, store)
    sampling = Sampling(a.temperature, a.top_p, a.top_k, a.max_new_tokens, seed=0)
    a.slots, a.max_model_len = 16, max(map(len, prompts)) + a.max_new_tokens
    with fleet_of(a, model, store.get) as fleet:
        samples = compare_table.ask(fleet, prompts, sampling)
    limits = a.max_delta, a.mean_delta
    case = compare_table.case_of(model, samples, sampling, a.dtype, a.trainer_dtype, limits)
    comparisons = compare_table.comparisons(case, model, store.get)
    command.say(compare_table.table(case, comparisons, a.dtype))
    return 0 if all(one.ok for one in comparisons.values()) else 1


if __name__ == "__main__":
    command.run(main, explain=failures.explain)
