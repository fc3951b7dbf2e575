"""`LLM`: prompts in, answers in their order, as the engine gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.model.generate import generate
from glm5.model.glm5 import GLM5
from glm5.model.presets import nano
from glm5.model.weights import save_model
from glm5.serve import LLM, SamplingParams
from glm5.text.tokenizer import Tokenizer
from glm5.utils.errors import ConfigError, UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    tokenizer = Tokenizer.train([f"def hello(name):\n    print(name, {n})\n" for n in range(400)], 320)
    save_model(GLM5(nano(vocab_size=320, num_hidden_layers=2, hidden_size=32, max_position_embeddings=512)), path)
    tokenizer.save(path)
    return path


def test_answers_come_in_the_order_of_the_prompts(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", pages=16, drafts=2)
    prompts = ["def hello", [7, 8, 9], "print"]
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logprobs=0)
    answers = llm.generate(prompts, params)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        ids = prompt if isinstance(prompt, list) else [*llm.tokenizer.prefix_ids, *llm.tokenizer.encode(prompt)]
        assert answer.ids == list(generate(llm.engine.model, ids, max_new_tokens=6, stop_ids=()))
        assert answer.text == llm.tokenizer.decode(answer.ids, skip_control=True)
        assert len(answer.logprobs) == 6
    assert len(llm.generate(["def"], SamplingParams(n=3, seed=1, max_new_tokens=2))[0]) == 3


def test_a_bad_prompt_leaves_nothing_behind(checkpoint: Path) -> None:
    llm = LLM(checkpoint, device="cpu", pages=16)
    for prompts in ([[7], [9999]], [[7], 5], "one text"):
        with pytest.raises(UserError):
            llm.generate(prompts)  # type: ignore[arg-type]
        assert not llm.engine.has_work
    with pytest.raises(ConfigError, match="stop='ab': must be a tuple"):  # and not two strings of one character
        llm.generate([[7]], SamplingParams(stop="ab"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no_such: no such setting"):
        LLM(checkpoint, no_such=1)
