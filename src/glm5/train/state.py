"""What training changes: weights, optimizer and random state; into a checkpoint and back, and as one whole model.

On many ranks each process holds its part, of a placed model or of a pipeline's stages. Both name it as the whole model
does, so a run goes on on another mesh.

Source: report sections 2.1 to 2.3. Read next: `checkpoint`, `sharded`, `random_state`, `piped`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glm5.model.glm5 import GLM5
from glm5.train.checkpoint import Checkpoint
from glm5.train.optim import MuonSplit
from glm5.train.random_state import capture_random_state, restore_random_state
from glm5.train.ranks import Ranks
from glm5.utils.errors import CheckpointError

if TYPE_CHECKING:
    from glm5.parallel.pipeline.engine import Pipeline


class TrainState:
    """The state of a model in training, as this process holds it.

    Args:
        model: on its device, placed on the ranks. pipeline: of which it is a stage, where there are several.
        optimizer: of the model's parameters.
        resting: fp32 weights behind those of a bf16 model that do not train, by name; see `whole_model`.

    `as_run` names weights of which `whole_model` has what ran, without the digits behind.
    """

    as_run: Collection[str] = ()

    def __init__(
        self,
        model: GLM5,
        pipeline: Pipeline | None,
        ranks: Ranks,
        optimizer: MuonSplit,
        resting: Mapping[str, Tensor],
    ) -> None:
        self._model, self._pipeline, self._ranks = model, pipeline, ranks
        self._optimizer, self._resting = optimizer, resting

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process, by name."""
        if self._pipeline is None:
            return dict(self._model.state_dict())
        from glm5.train.piped import state

        return state(self._pipeline)

    # ------------------------------------------------------------------ a checkpoint
    def places(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint lies: see `ShardedStore`."""
        places: dict[str, Tensor] = {f"model/{name}": t for name, t in self.weights().items()}
        parts: Any = self._model if self._pipeline is None else self._pipeline
        for name, p in parts.named_parameters():
            places |= {f"optimizer/{name}.{key}": p for key in ("momentum", "exp_avg", "exp_avg_sq", "master")}
        return places

    def capture(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Tensors by group and name, and the rest as JSON values."""
        random_tensors, random_state = capture_random_state()
        tensors = {
            "model": self.weights(),
            "optimizer": self._optimizer.named_state(),
            "random": self._drawn(random_tensors),
        }
        return tensors, {"random": random_state}

    def restore(self, found: Checkpoint, seed: int) -> None:
        """Take all of it from a checkpoint.

        Args:
            seed: where many ranks train: of their devices' random state, which is not kept.

        Raises:
            CheckpointError: it holds another model.
        """
        try:
            if self._pipeline is None:
                self._model.load_state_dict(found.tensors["model"])
            else:
                from glm5.train.piped import load_state

                load_state(self._pipeline, found.tensors["model"])
        except (RuntimeError, CheckpointError) as e:
            what = f"{found.path} holds another model: {' '.join(str(e).split())[:300]}"
            mend = "Resume with the model it was saved with, or choose another directory"
            raise CheckpointError(what, mend) from None
        self._optimizer.load_named_state(found.tensors.get("optimizer", {}))  # before the first step it has no state
        if not self._ranks.alone:
            torch.manual_seed(seed)
        restore_random_state(self._drawn(found.tensors["random"]), found.state["random"])

    def _drawn(self, random: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The random state that counts: of many ranks each has its own device, and draws nothing from it."""
        return {name: t for name, t in random.items() if self._ranks.alone or not name.startswith("torch.cuda")}

    # ------------------------------------------------------------------ one model
    def whole_model(self) -> GLM5:
        """The model with all digits: itself, or a copy with the fp32 weights behind a bf16 model's.

        On many ranks a whole copy, on the main rank's CPU and without weights on the others; all ranks call this.
        """
        if self._ranks.alone and self._model.dtype == torch.float32:
            return self._model
        masters = self._optimizer.named_state() | {f"{name}.master": t for name, t in self._resting.items()}
        for name in self.as_run:
            masters.pop(f"{name}.master", None)
        exact = {name: masters.get(f"{name}.master", t).detach() for name, t in self.weights().items()}
        main = self._ranks.main
        device = self._model.device if self._ranks.alone else torch.device("cpu" if main else "meta")
        with device:
            full = GLM5(self._model.config.replace(dtype="float32"), seed=None)
        if self._pipeline is not None:
            from glm5.train.piped import brought_together

            assert self._ranks.world is not None
            tensors = brought_together(exact, self._ranks.world)
        else:  # one after the other, so that only the main rank ever has them all
            tensors = {name: got for name, t in exact.items() if (got := self._whole_on_main(t)) is not None}
        if main:
            full.load_state_dict(tensors)
        return full

    def _whole_on_main(self, t: Tensor) -> Tensor | None:
        whole = self._ranks.whole(t)
        return (whole if self._ranks.alone else whole.cpu()) if self._ranks.main else None
