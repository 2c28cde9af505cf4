"""Monitor and log the loss scale of an fp16 run."""

from collections import deque
from typing import Any

from fairseq.logging import metrics

# Attributes of fairseq's DynamicLossScaler that determine when it changes the loss scale next.
SCALER_STATE = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")


class LossScaleMonitor:
    """Counts the updates that fp16 skips because of an overflow, and keeps the last 8 loss scales for error messages.

    A loss scale is kept once for all consecutive updates that use it. Without fp16 there is no scaler: `scaler` stays
    None and `overflows` stays 0.
    """

    def __init__(self) -> None:
        self.scaler: Any = None
        self.overflows = 0
        self.recent_scales: deque[float] = deque(maxlen=8)
        self._last_overflow = -1  # the scaler's iteration

    def before_step(self, optimizer: Any) -> None:
        """Count the previous update if it overflowed, and record the loss scale if it has changed."""
        self.scaler = find_scaler(optimizer)
        if self.scaler is None:
            return
        if self.scaler._last_overflow_iter > self._last_overflow:
            self.overflows += 1
            self._last_overflow = self.scaler._last_overflow_iter
        if not self.recent_scales or self.recent_scales[-1] != self.scaler.loss_scale:
            self.recent_scales.append(self.scaler.loss_scale)

    def log(self) -> None:
        """Log the number of overflows and the inverse loss scale, but nothing without fp16."""
        if self.scaler is None:
            return
        metrics.log_scalar("overflows", self.overflows, weight=0, priority=710, round=0)
        # Derived metrics are computed last: fairseq logs the loss scale of an update after all other metrics.
        metrics.log_derived("inverse_loss_scale", _inverse_loss_scale, priority=705)

    def scaler_state(self) -> dict[str, int]:
        """Return the values of SCALER_STATE for a checkpoint, because fairseq saves only the loss scale.

        Without a scaler, the result is empty.
        """
        if self.scaler is None:
            return {}
        return {name: getattr(self.scaler, name) for name in SCALER_STATE}

    def restore_scaler(self, optimizer: Any, saved: dict[str, int]) -> None:
        """Set the counters of the optimizer's scaler to `saved`, a result of `scaler_state`.

        If the optimizer has no scaler or `saved` is empty, nothing changes.
        """
        scaler = find_scaler(optimizer)
        if scaler is None or not saved:
            return
        for name in SCALER_STATE:
            setattr(scaler, name, saved[name])
        self._last_overflow = scaler._last_overflow_iter


def _inverse_loss_scale(meters: Any) -> float:
    """Return 1 / loss scale, or 0.0 before fairseq has logged a loss scale."""
    if "loss_scale" not in meters:
        return 0.0
    return 1 / meters["loss_scale"].val


def find_scaler(optimizer: Any) -> Any:
    """Return the DynamicLossScaler of fairseq's fp16 optimizer, or None.

    The result is None in float32 and bf16, which do not scale the loss, and with amp, which uses torch's scaler.
    """
    scaler = getattr(optimizer, "scaler", None)
    if not hasattr(scaler, "_last_overflow_iter"):
        return None
    return scaler
