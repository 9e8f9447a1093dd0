"""TRL's side of end_to_end: its GRPOTrainer on the workload, with the seconds of each step.

`python -m experiments.bench.end_to_end_trl DIR STEPS [--microbatch=N] [--bf16]` (extra: trl).
"""

import argparse
import itertools
import json
import time
import warnings

warnings.filterwarnings("ignore")


def main(directory: str, steps: int, microbatch: int, bf16: bool) -> None:
    """Train `steps` steps, `microbatch` completions at once; print a JSON object.

    `seconds` has one entry per step, `mean_length` is that of the completions.
    """
    import os

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from experiments.bench import workload as w

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with open(f"{directory}/prompts.jsonl") as file:
        rows = [json.loads(line)["question"] for line in file]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": r}]} for r in rows])
    lengths = []

    def reward(completion_ids, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [w.reward(completion_ids=ids) for ids in completion_ids]

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=f"{directory}/trl",
        max_steps=steps,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=w.PROMPTS * w.SAMPLES // microbatch,
        num_generations=w.SAMPLES,
        max_completion_length=w.NEW_TOKENS,
        generation_kwargs={"min_new_tokens": w.NEW_TOKENS},
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=bf16,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(f"{directory}/model"),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    print(json.dumps({"seconds": seconds, "mean_length": sum(lengths) / len(lengths)}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("steps", type=int)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--bf16", action="store_true")
    main(**vars(parser.parse_args()))
