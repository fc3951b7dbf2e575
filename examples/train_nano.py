"""GLM-5 from text to a sparse model that writes, in one page: corpus, tokenizer, pre-training, DSA, generation.

    python examples/train_nano.py                      the Python standard library; about half an hour on two cores
    python examples/train_nano.py DIRECTORY --tiny     any directory of text, at a size for a quick look

What `glm5 pretrain` and `glm5 sparsify` add to this: resumption, options, copies of held-out text removed.
Read next: `glm5.train.loop`.
"""

import argparse
import tempfile
from pathlib import Path

from glm5.data import Loader, TokenDataset, collect_files, split_held_out, stdlib_sources
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.text import Tokenizer
from glm5.train.config import TrainConfig
from glm5.train.evaluate import held_out, indexer_recall
from glm5.train.loop import Trainer
from glm5.train.schedule import BatchWarmup, LearningRate

parser = argparse.ArgumentParser()
parser.add_argument("corpus", nargs="?", help="a directory of text; by default the Python standard library")
parser.add_argument("--tiny", action="store_true", help="a minute's worth")
options = parser.parse_args()

# How much of everything: a full nano, or a smaller one that shows that it works.
seq_len, steps, rows = (64, (40, 10, 10), 4) if options.tiny else (512, (600, 60, 60), 8)
small = dict(hidden_size=64, num_hidden_layers=2, n_routed_experts=4, vocab_size=512, index_topk=16)
directory = Path(tempfile.mkdtemp(prefix="train-nano-"))

# Text: documents, of which some are never trained on, and a tokenizer that has seen only the others.
corpus = collect_files(options.corpus) if options.corpus else stdlib_sources()
print(corpus.summary())
training, kept_back = split_held_out(corpus.documents, 0.05)
config = nano(**small) if options.tiny else nano()
tokenizer = Tokenizer.train((document.text for document in training), config.vocab_size)
train_rows = TokenDataset.build(training, tokenizer, directory / "training", seq_len)
held_rows = TokenDataset.build(kept_back, tokenizer, directory / "held-out", seq_len)

model = GLM5(config, seed=0)
batch = BatchWarmup(rows, rows, 0)


def train(stage: str, count: int, lr: LearningRate) -> None:
    """One stage: the loader hands out rows, the trainer does the rest."""
    stage_config = TrainConfig(stage=stage, steps=count, batch=batch, micro_batch=rows, lr=lr, mtp_share=0.25)
    Trainer(stage_config, model, Loader(train_rows, seed=0), directory / stage).run()


def report(name: str, *, sparse: bool) -> None:
    """What held-out text costs now, and how much of the attention the indexers find."""
    found = held_out(model, held_rows, sparse=sparse, max_rows=64)
    recall = indexer_recall(model, held_rows, max_rows=16)
    print(f"{name:<24} {found.bits_per_byte:.3f} bits per byte, recall {sum(recall) / len(recall):.3f}")


# Everything but the indexers learns, with dense attention (report, section 2.1).
train("pretrain", steps[0], LearningRate(peak=0.02, final=0.001, warmup_steps=10))
report("dense", sparse=False)

# The indexers alone learn what the dense attention looks at; then all learn with what they select (section 2.1.1).
train("warmup", steps[1], LearningRate(peak=0.02, final=0.001, shape="linear"))
report("sparse, warm-up only", sparse=True)
train("sparse", steps[2], LearningRate(peak=1e-3, shape="constant"))
report("sparse, adapted", sparse=True)

# Write, with three drafts from the shared MTP block at every step.
prompt = "import os\n\n\ndef "
ids = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
text = model.eval().generate(ids, max_new_tokens=80, temperature=0.5, seed=0, speculate=3)
print(prompt + tokenizer.decode(text, skip_control=True))
