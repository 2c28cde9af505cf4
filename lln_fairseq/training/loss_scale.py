"""Follow the loss scale of an fp16 training."""

from collections import deque
from typing import Any

SCALER_STATE = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class LossScaleMonitor:
    """Count the updates that fp16 skips because of an overflow, and keep the last loss scales for error messages."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self.overflows = 0
        self.recent_scales: deque[float] = deque(maxlen=8)
        self._last_overflow = -1

    def before_step(self, optimizer: Any) -> None:
        """Count an overflow of the previous batch, and record the loss scale if it has changed."""
        self.scaler = find_scaler(optimizer)
        if self.scaler is None:
            return
        if self.scaler._last_overflow_iter > self._last_overflow:
            self.overflows += 1
            self._last_overflow = self.scaler._last_overflow_iter
        if not self.recent_scales or self.recent_scales[-1] != self.scaler.loss_scale:
            self.recent_scales.append(self.scaler.loss_scale)

    def scaler_state(self) -> dict[str, int]:
        """Return where the scaler is in its window. fairseq saves only the loss scale. Empty without a scaler."""
        if self.scaler is None:
            return {}
        return {name: getattr(self.scaler, name) for name in SCALER_STATE}

    def restore_scaler(self, optimizer: Any, saved: dict[str, int]) -> None:
        """Put the state that `scaler_state` returned into the optimizer's scaler, if both exist."""
        scaler = find_scaler(optimizer)
        if scaler is None or not saved:
            return
        for name in SCALER_STATE:
            setattr(scaler, name, saved[name])
        self._last_overflow = scaler._last_overflow_iter


def find_scaler(optimizer: Any) -> Any:
    """Return fairseq's DynamicLossScaler of an fp16 optimizer, else None: amp and bf16 have another one or none."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler if hasattr(scaler, "_last_overflow_iter") else None
