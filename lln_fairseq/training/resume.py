"""What a checkpoint needs beside what fairseq puts into it, so that a run goes on as if it had not been interrupted.

overflows            the number of updates that fp16 had to skip so far
patience             how long there has been no better score, for a training that stops early
scaler               where the loss scaler is in its window; fairseq keeps the loss scale alone
masters              the float32 parameters of --fp16 and --bf16; fairseq starts again from their 16-bit copies
dictionary           its hash, so that data with another one are refused
origin               hashes of the data and of the model that the run began with: others for the same run are refused
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lln_fairseq.checkpoints.compatibility import dictionary_hash
from lln_fairseq.checkpoints.reading import OUR_STATE
from lln_fairseq.errors import InputError, first_line
from lln_fairseq.training import run_state

MACHINE_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError, torch.distributed.DistError)  # say nothing of a state
SCALER_STATE = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class ExactResume:
    """Goes in front of a fairseq task; watches the optimizer, which fairseq shows to a task in train_step alone."""

    overflows = 0
    _optimizer: Any = None
    _pending: dict[str, Any] | None = None  # a checkpoint's state, until there is an optimizer to put it into
    _first_update = True  # of this process
    _last_overflow = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.origin: dict[str, str] = {}  # of same_run.py, set where a training begins
        self.loss_scales: deque[float] = deque(maxlen=8)  # of the last updates, for the message when they run out

    def train_step(self, sample: Any, model: Any, criterion: Any, optimizer: Any, *args: Any, **kwargs: Any) -> tuple:
        self._optimizer = optimizer
        if self._pending is not None:
            self._restore(self._pending)
            self._pending = None
        if scaler := self.scaler:
            if scaler._last_overflow_iter > self._last_overflow:
                self.overflows, self._last_overflow = self.overflows + 1, scaler._last_overflow_iter
            if not self.loss_scales or self.loss_scales[-1] != scaler.loss_scale:
                self.loss_scales.append(scaler.loss_scale)
        return super().train_step(sample, model, criterion, optimizer, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The first update of a run that goes on shows whether the optimizer's state can be used. Raises: InputError
        where it cannot."""
        restored = self._first_update and bool(self._optimizer.optimizer.state)
        self._first_update = False
        try:
            super().optimizer_step(*args, **kwargs)
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
            if not restored or isinstance(error, (InputError, *MACHINE_ERRORS)) or "memory" in str(error):
                raise
            raise InputError(
                f"the checkpoint is damaged: its optimizer's state does not fit ({first_line(error)}); "
                "--reset-optimizer (checkpoint.reset_optimizer=true) goes on without it"
            ) from error

    @property
    def scaler(self) -> Any:
        """fairseq's DynamicLossScaler in an fp16 run, else None (amp and bf16 have another or none)."""
        scaler = getattr(self._optimizer, "scaler", None)
        return scaler if hasattr(scaler, "_last_overflow_iter") else None

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Called by fairseq when it saves; becomes part of the checkpoint's extra_state."""
        state: dict[str, Any] = {"overflows": self.overflows, "patience": run_state.patience()}
        if scaler := self.scaler:
            state["scaler"] = {name: getattr(scaler, name) for name in SCALER_STATE}
        if not self.cfg.no_save_optimizer_state:
            state["masters"] = [master.detach().cpu() for master in self._masters()]
        # fairseq looks its tasks' state up by class name, and checkpoint.py by ours
        data = {
            "dictionary": dictionary_hash(self.source_dictionary),
            "labels": getattr(self, "labels", []),
        }
        return {type(self).__name__: state, OUR_STATE: data | self.origin}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Called by fairseq when it resumes a run; not when it fine-tunes. Raises: InputError."""
        kinds = {"overflows": int, "patience": dict}
        if any(not isinstance(state.get(k, kind()), kind) for k, kind in kinds.items()):
            raise InputError(f"the checkpoint is damaged: its {type(self).__name__} holds no state of a task")
        self._pending, self.overflows = state, state.get("overflows", 0)
        run_state.restore_patience(state.get("patience", {}))

    def _restore(self, state: dict[str, Any]) -> None:
        saved = state.get("scaler")
        if self.scaler and isinstance(saved, dict):
            for name in SCALER_STATE:
                if isinstance(saved.get(name), int):
                    setattr(self.scaler, name, saved[name])
            self._last_overflow = self.scaler._last_overflow_iter
        masters = self._masters()
        values = state.get("masters", [])
        if [master.shape for master in masters] == [getattr(value, "shape", None) for value in values]:
            with torch.no_grad():
                for master, value in zip(masters, values, strict=True):
                    master.copy_(value)

    def _masters(self) -> list[Tensor]:
        """Return the float32 parameters of --fp16 or --bf16: one tensor per device or one per parameter.

        The list is empty in float32 and with --memory-efficient-fp16 and --memory-efficient-bf16.
        """
        masters = getattr(self._optimizer, "fp32_params", None)
        return list(masters.values()) if isinstance(masters, dict) else list(masters) if masters is not None else []
