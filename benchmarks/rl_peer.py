"""Reinforcement learning beside TRL's GRPO: one dense model, one set of prompts, one reward, one machine, by turns.

    pip install trl accelerate datasets
    python benchmarks/rl_peer.py [--rounds 3] [--steps 30] [--json FILE]

Sides, which run after each other in every round, each from the beginning:

    ours         `glm5 rl reason`, as it is by default: Muon Split, engine, verifiers in processes of their own
    ours-adamw   the same with AdamW for all parameters
    ours-varying the same with an engine that is not batch-invariant, as TRL's generation is not
    trl          TRL's GRPOTrainer on transformers' GLM-5, which loads our checkpoint: the very same weights, and
                 generation by transformers
    trl-llama    the same on transformers' Llama of the same width, layers, heads and about as many parameters,
                 fine-tuned on the same conversations by AdamW: what TRL does with a model that has no indexer

Equal on all sides: prompts as ids, reward function, groups (8 of 8 answers a step), longest answer, temperature, clip
0.2 and 0.28, a mean of a sequence, advantages by mean and deviation, no KL, one update a step in fp32, constant rates,
one thread. The model is dense: no layer has experts, there is no MTP, and the index selects all (2,048 of some 20).
Not equal: ours corrects by IcePop (nothing lies outside its band here), leaves out groups whose rewards are equal,
compares the engine's weights with what was sent, keeps a ledger, and judges in other processes; each optimizer has a
rate of its own.

Steps a second are of all steps but the first, by the clock; as other work may share the machine, the processor time of
this process for a step stands beside; the verifiers' processes, of ours alone, are not in it. Reward a minute is
the rise of the drawn answers' mean reward, from the first five steps to the last five, over the clock's time between.
Before and after are greedy success on held-out prompts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from learning import quiet, tuned

# Beside this file lies a kernels.py, which transformers would take for a package of that name.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]

import torch

from glm5 import GLM5, load_model, save_model
from glm5.model.presets import nano
from glm5.posttrain import learner as learning
from glm5.posttrain.learner import LearnConfig
from glm5.posttrain.prompts import Prompt
from glm5.posttrain.reason import PromptConfig, ReasonConfig, prepare_prompts, reason, verifier_pool
from glm5.posttrain.rollouts import RolloutConfig, Rollouts
from glm5.posttrain.verify.short import short
from glm5.text import Tokenizer, load_tokenizer
from glm5.text.chat import render
from glm5.train.roles import ParamRole, parameter_roles
from glm5.train.schedule import LearningRate
from glm5.utils.runlog import read_metrics

PROMPTS, GROUP, LONGEST, HELD_OUT = 8, 8, 4, 200
FEW = 5  # steps that a reward is averaged over, at the beginning and at the end
SIDES = ("ours", "ours-adamw", "ours-varying", "trl", "trl-llama")


def write_tasks(directory: Path) -> None:
    """The largest of three digits: prompts to learn from and to measure, and conversations."""
    triples = list(itertools.product("0123456789", repeat=3))
    random.Random(0).shuffle(triples)  # noqa: S311
    rows = [{"prompt": f"big {' '.join(t)}", "answer": max(t), "verifier": "short", "domain": "big"} for t in triples]
    for part, some in (("held", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (directory / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    talk = [
        {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"]}]}
        for r in rows[HELD_OUT:]
    ]
    (directory / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))


class Bench:
    """What all sides share: tasks, tokenizer, and the models to begin with."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self.directory, self.args = directory, args
        write_tasks(directory)
        self.prompts = PromptConfig(
            data=(str(directory / "train.jsonl"),), held_out=(str(directory / "held.jsonl"),), held_out_count=HELD_OUT
        )
        talk = directory / "talk.jsonl"
        tokenizer = Tokenizer.train([talk.read_text()], 300)
        shape = nano(
            vocab_size=tokenizer.vocab_size,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            first_k_dense_replace=args.layers,
            num_nextn_predict_layers=0,
            index_topk=2048,
        )
        self.shape = replace(shape, eos_token_id=(tokenizer.user_id,))
        save_model(GLM5(self.shape, seed=0), directory / "base", tokenizer=tokenizer)
        self.start = tuned(directory / "base", [talk], args, 0, batch=8, seq_len=64)
        self.tokenizer = load_tokenizer(self.start)
        found = prepare_prompts(self.prompts, 0)
        self.train, self.held_out = found.train, found.held_out

    def text(self, prompt: Prompt) -> str:
        """A prompt as the model reads it, special tokens as text."""
        rendered = render(
            self.tokenizer, prompt.messages, (), enable_thinking=False, clear_thinking=False, add_generation_prompt=True
        )
        return self.tokenizer.decode(list(rendered.ids))


# ---------------------------------------------------------------------------------------------------- ours
@contextmanager
def adamw_only(wanted: bool) -> Iterator[None]:
    """The learner takes its roles by this name."""

    def roles(*arguments: Any) -> list[ParamRole]:
        return [replace(role, optimizer="adamw", blocks=()) for role in parameter_roles(*arguments)]

    learning.parameter_roles = roles if wanted else parameter_roles
    try:
        yield
    finally:
        learning.parameter_roles = parameter_roles


def ours(bench: Bench, run: Path, seed: int, side: str) -> dict[str, Any]:
    """Learn by the function behind the command."""
    args, adamw = bench.args, side != "ours"
    rate = args.adamw_lr if adamw else args.muon_lr
    config = ReasonConfig(
        checkpoint=str(bench.start),
        run=str(run),
        prompts=PromptConfig(data=bench.prompts.data),
        rollout=RolloutConfig(
            prompts=PROMPTS,
            group=GROUP,
            max_new_tokens=LONGEST,
            thinking=False,
            zero_variance="drop",
            invariant="off" if side == "ours-varying" else "auto",
            memory_gib=0.1,
        ),
        learn=LearnConfig(
            steps=args.steps, lr=LearningRate(rate, rate), seed=seed, save_every=10_000, micro_batch=64, row_tokens=64
        ),
        device="cpu",
        eval_every=0,
        page_every=0,
    )
    clocks: list[tuple[float, float]] = []
    push = Rollouts.push

    def pushed(self: Rollouts, *arguments: Any) -> None:
        """The end of a step; the first call is before all."""
        push(self, *arguments)
        clocks.append(clock())

    Rollouts.push = pushed  # type: ignore[method-assign]
    try:
        with adamw_only(adamw):
            model = reason(config, quiet).model
    finally:
        Rollouts.push = push  # type: ignore[method-assign]
    records = [r for r in read_metrics(run) if r["step"]]
    rollout = RolloutConfig(max_new_tokens=LONGEST, thinking=False, memory_gib=0.1)
    success = []
    with verifier_pool(rollout, bench.held_out) as pool:
        for path in (bench.start, model):
            judge = Rollouts(load_model(path), bench.tokenizer, rollout, pool, seed=0)
            success.append(judge.success(bench.held_out)["big"])
    parts = {
        name: statistics.mean([r[f"time/{name}"] for r in records[1:]]) for name in ("rollout", "verify", "weight_sync")
    }
    return figures(clocks[1:], [r["reward"] for r in records], success) | {"seconds of a step": parts}


def clock() -> tuple[float, float]:
    """Seconds by the clock, and of this process on a processor."""
    return time.perf_counter(), time.process_time()


def figures(
    clocks: Sequence[tuple[float, float]], rewards: Sequence[float], success: Sequence[float]
) -> dict[str, Any]:
    """clocks: at the end of each step."""
    early, late = statistics.mean(rewards[:FEW]), statistics.mean(rewards[-FEW:])
    per_step, busy = ((clocks[-1][i] - clocks[0][i]) / (len(clocks) - 1) for i in (0, 1))
    return {
        "steps a second": 1 / per_step,
        "processor seconds a step": busy,
        "before": success[0],
        "after": success[1],
        "rewards": [early, late],
        "reward a minute": (late - early) / (per_step * (len(rewards) - FEW) / 60),
    }


# ---------------------------------------------------------------------------------------------------- TRL
def hugging_tokenizer(bench: Bench) -> Any:
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(
        tokenizer_file=str(bench.start / "tokenizer.json"), eos_token="<|user|>", pad_token="<|endoftext|>"
    )
    found.padding_side = "left"
    for prompt in bench.held_out[:20]:
        rendered = render(
            bench.tokenizer,
            prompt.messages,
            (),
            enable_thinking=False,
            clear_thinking=False,
            add_generation_prompt=True,
        )
        if found(bench.text(prompt))["input_ids"] != list(rendered.ids):
            raise SystemExit("the two tokenizers read a prompt differently")
    return found


def llama(bench: Bench) -> Any:
    """A Llama of the same width, depth and heads, and about as many parameters, that learned the same conversations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = bench.shape
    own = sum(p.numel() for p in load_model(bench.start).parameters())

    def made(inner: int) -> Any:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                num_hidden_layers=shape.num_hidden_layers,
                num_attention_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_attention_heads,
                intermediate_size=inner,
                max_position_embeddings=2048,
                tie_word_embeddings=False,
            )
        )

    inner = shape.intermediate_size
    short_by = own - made(inner).num_parameters()
    model = made(inner + short_by // (3 * shape.hidden_size * shape.num_hidden_layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    rng = random.Random(0)  # noqa: S311
    tokenizer = bench.tokenizer
    for _ in range(bench.args.llama_steps):
        rows = []
        for prompt in rng.sample(bench.train, 32):
            rendered = render(
                tokenizer, prompt.messages, (), enable_thinking=False, clear_thinking=False, add_generation_prompt=True
            )
            rows.append([*rendered.ids, *tokenizer.encode(str(prompt.answer)), tokenizer.user_id])
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(r)) + r for r in rows])
        labels = torch.full_like(ids, -100)
        labels[:, -2:] = ids[:, -2:]
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, bench: Bench) -> float:
    """Success on the held-out prompts, by transformers."""
    model.eval()
    batch = tokenizer([bench.text(p) for p in bench.held_out], return_tensors="pt", padding=True)
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    out = model.generate(
        **given, max_new_tokens=LONGEST, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    said = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return statistics.mean(
        short(text, p.answer, {}).reward or 0.0 for text, p in zip(said, bench.held_out, strict=True)
    )


def trl(bench: Bench, run: Path, seed: int, make: Callable[[], Any]) -> dict[str, Any]:
    """Learn by GRPOTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    args, tokenizer, model = bench.args, hugging_tokenizer(bench), make()
    before = greedy(model, tokenizer, bench)
    times: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(clock())

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [short(said, right, {}).reward or 0.0 for said, right in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=str(run),
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=args.steps,
        learning_rate=args.adamw_lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=seed,
        log_level="error",
    )
    data = Dataset.from_list([{"prompt": bench.text(p), "answer": str(p.answer)} for p in bench.train])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    rewards = [r["reward"] for r in trainer.state.log_history if "reward" in r]
    return figures(times, rewards, (before, greedy(trainer.model, tokenizer, bench)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--sft-steps", type=int, default=24)
    parser.add_argument("--sft-lr", type=float, default=3e-3)
    parser.add_argument("--llama-steps", type=int, default=40)
    parser.add_argument("--muon-lr", type=float, default=5e-4)
    parser.add_argument("--adamw-lr", type=float, default=2e-4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import transformers
    import trl as peer
    from transformers import AutoModelForCausalLM

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": peer.__version__}
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides.split(",")}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), args)
        other = llama(bench) if "trl-llama" in results else None
        state = None if other is None else {name: t.clone() for name, t in other.state_dict().items()}

        def theirs() -> Any:
            return AutoModelForCausalLM.from_pretrained(str(bench.start), dtype=torch.float32)

        def smaller() -> Any:
            assert other is not None
            other.load_state_dict(state)
            return other

        sizes = {"glm": sum(p.numel() for p in theirs().parameters()), "llama": other and other.num_parameters()}
        print(f"parameters {sizes}, {versions}", flush=True)
        for number in range(args.rounds):
            order = (
                list(results)[number % len(results) :] + list(results)[: number % len(results)]
            )  # nobody always first
            for side in order:
                run = Path(scratch) / f"{side}-{number}"
                if side.startswith("ours"):
                    found = ours(bench, run, number, side)
                else:
                    found = trl(bench, run, number, theirs if side == "trl" else smaller)
                results[side].append(found)
                print(number, side, found, flush=True)
    titles = ("steps/s", "CPU s/step", "before", "after", "first rewards", "last rewards", "reward/minute")
    print(f"{'':<12}" + "".join(f"{title:>22}" for title in titles))
    for side, rounds in results.items():
        cells = []
        columns = [
            [r["steps a second"] for r in rounds],
            [r["processor seconds a step"] for r in rounds],
            *([r[name] for r in rounds] for name in ("before", "after")),
            *([r["rewards"][at] for r in rounds] for at in (0, 1)),
            [r["reward a minute"] for r in rounds],
        ]
        for values in columns:
            spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
            cells.append(f"{statistics.median(values):.3f}{spread}")
        print(f"{side:<12}" + "".join(f"{cell:>22}" for cell in cells))
    if args.json:
        document = {"arguments": vars(args), "versions": versions, "parameters": sizes, "results": results}
        Path(args.json).write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
