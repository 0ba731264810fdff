"""How long a step of so many tokens takes, learned while it runs.

Owns one line through what was measured: seconds = base + per_token * tokens. Refuses buckets, rows and context: a
policy needs to know what a piece of a prompt costs the rows beside it, not why.
"""

_DECAY = 0.99  # of the weight of a measurement with each one after it
_MIN_WEIGHT = 8.0


class StepTimes:
    """Least squares with fading weights. Mutated only by the policy that made it.

    Attributes:
      base_s: seconds of a step of no tokens; 0 until something is known.
      per_token_s: seconds for each token; 0 until steps of different sizes have been seen.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.per_token_s = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether enough has been measured."""
        return self._weight >= _MIN_WEIGHT and self.per_token_s > 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """One step."""
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + num_tokens
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + num_tokens * num_tokens
        self._xy = self._xy * _DECAY + num_tokens * seconds
        spread = self._xx - self._x * self._x / self._weight
        if spread > 1e-9 * self._xx:
            slope = (self._xy - self._x * self._y / self._weight) / spread
            self.per_token_s = max(0.0, slope)
            self.base_s = max(0.0, (self._y - self.per_token_s * self._x) / self._weight)
