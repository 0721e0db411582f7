"""What an answer cost: seconds and tokens. Knows no model."""

from dataclasses import dataclass

from llamagraph.text.matcher import Constraint


@dataclass
class Timings:
    """Seconds of loading, and since generation began; the tokens that they were spent on.

    `n_prompt` are those of the prompt that were read, `n_reused` those that were there already.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0
    n_prompt: int = 0
    n_generated: int = 0
    constraint: Constraint | None = None
    n_reused: int = 0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.n_prompt / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        spent = self.seconds - self.first_token_seconds
        return (self.n_generated - 1) / spent if spent > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        c = self.constraint
        return {
            "load_seconds": self.load_seconds,
            "first_token_seconds": self.first_token_seconds,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "prompt_tokens_reused": self.n_reused,
            **({"grammar_rejections": c.n_rejected, "grammar_us_per_token": c.us_per_token}
               if c else {}),
        }
