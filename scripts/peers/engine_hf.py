"""HF transformers' `generate`: static batches with padding on the left.

Attention is what transformers takes by itself: PyTorch's own (SDPA), but for BLOOM and Gemma 2, which cannot have it.

Models are loaded for both of transformers' modes, and requests cut into batches. Requests that come later are refused:
a static batch has no place for them. "experts" among the overrides chooses how experts are computed: "eager", a loop
over them, without it, or "grouped_mm". On a GPU "compile" among the overrides turns on the static cache, with which
`generate` compiles the decode step itself.
"""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from peers.values import Answer, Ask, Settings

_MAX_BATCH = 64


def load_model(settings: Settings) -> Any:
    """The model on its device, in evaluation mode."""
    torch.set_num_threads(settings.threads)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    device = "cuda" if settings.device == "gpu" else "cpu"
    if not settings.random_weights:
        experts = settings.overrides.get("experts", "eager")
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, experts_implementation=experts).to(
            device
        )
    else:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(Path(settings.model))
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)  # without an end: lengths are forced
    return model.eval().requires_grad_(False)


def make_about(model: Any, settings: Settings, more: dict[str, Any]) -> dict[str, Any]:
    """Versions and settings; `model` is as `load_model` returned it."""
    if hasattr(model.config, "num_local_experts"):
        more = {"experts": model.config._experts_implementation, **more}
    attention = model.config._attn_implementation
    device = torch.cuda.get_device_name() if settings.device == "gpu" else "cpu"
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {"dtype": settings.dtype, "attention": attention, "threads": torch.get_num_threads(), **more},
        "device": device,
    }


class _Times(StoppingCriteria):
    """Never stops; notes when each step of a batch had its tokens."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[0, -1].item()  # on a GPU: until the token is there
        self.times_s.append(time.perf_counter() - self._start_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Engine:
    """One model, one batch after the other."""

    def __init__(self, settings: Settings) -> None:
        self._model = load_model(settings)
        self._compile = bool(settings.overrides.get("compile"))
        self.about = make_about(self._model, settings, {"max_batch": _MAX_BATCH, "compile": self._compile})

    def run(self, asks: list[Ask]) -> list[Answer]:
        """Longest outputs together, since a batch lasts as long as its longest."""
        if any(ask.due_s for ask in asks):
            raise ValueError("generate has no place for requests that come while a batch runs")
        start_s = time.perf_counter()
        order = sorted(range(len(asks)), key=lambda index: -asks[index].num_tokens)
        answers: dict[int, Answer] = {}
        for first in range(0, len(order), _MAX_BATCH):
            chosen = order[first : first + _MAX_BATCH]
            answers.update(zip(chosen, self._batch([asks[index] for index in chosen], start_s), strict=True))
        return [answers[index] for index in range(len(asks))]

    def _batch(self, asks: list[Ask], start_s: float) -> list[Answer]:
        width = max(len(ask.prompt) for ask in asks)
        ids = torch.zeros((len(asks), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        options = GenerationConfig(
            max_new_tokens=max(ask.num_tokens for ask in asks),
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static" if self._compile else None,
        )
        times = _Times(start_s)
        device = self._model.device
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=options,
                stopping_criteria=[times],
            )
        tokens = out[:, width:].tolist()
        return [
            Answer(tokens=tuple(row[: ask.num_tokens]), times_s=tuple(times.times_s[: ask.num_tokens]))
            for row, ask in zip(tokens, asks, strict=True)
        ]
