"""Pictures on this CPU beside Hugging Face transformers: the tower alone, and times to first tokens.

    python scripts/bench_tower.py --peer ~/.cache/jaxserve/peers/hf/bin/python [--record benchmarks/pictures_cpu.json]
    python scripts/bench_tower.py --tower-only    # this package alone, and only its tower

`--peer` is the Python of an environment that scripts/peers/setup_peers.sh makes. Both have the same shapes: Qwen2-VL-2B
cut to a few layers, and its tower cut to a few blocks (`--layers`), with random float32 weights; and both take all
cores. They run in processes of their own, one after the other within each round, and each figure is the median of the
rounds. Every picture is a new one of 448 x 448 pixels, 1,024 patches, 256 tokens; a question behind it has 24 tokens.

    tower          seconds for one picture in the tower
    tower of 8     for eight: transformers takes them in one call
    first token    seconds to the first token of one request with a picture
    8 requests     mean of these times of eight requests with a picture each, at once. transformers takes a batch, whose
                   first tokens come together; and the same requests one by one, whose last is as late as those of the
                   batch, and their mean less
    one picture    mean for eight different questions about one picture, at once; transformers as in the line before
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

GRID = (1, 32, 32)
SIDE = 448
NUM_PATCHES = math.prod(GRID)
NUM_TOKENS = NUM_PATCHES // 4
QUESTION = 24
NUM_REQUESTS = 8
START, END, PLACEHOLDER = 151652, 151653, 151655
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "image_token_id": PLACEHOLDER,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": 151656,
}
VISION: dict[str, Any] = {"embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "hidden_size": 1536}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
    "min_pixels": 56 * 56,
    "max_pixels": SIDE * SIDE,
}
FIGURES = ("tower", "tower of 8", "first token", "8 requests", "one picture")


def write_model(directory: Path, layers: int) -> None:
    """The files that both read: no weights."""
    config = CONFIG | {"num_hidden_layers": layers, "vision_config": VISION | {"depth": layers}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def question(rng: np.random.Generator) -> list[int]:
    """Some text."""
    return rng.integers(1000, 100_000, QUESTION).tolist()


class OfJaxserve:
    """This package: its tower by itself, and an engine in this process."""

    def __init__(self, model: Path, tower_only: bool) -> None:
        self.rng = np.random.default_rng()
        self.tower = self._make_tower(model)
        self._llm: Any = None
        self._loop = asyncio.new_event_loop()
        if not tower_only:
            from jaxserve import AsyncLLM

            overrides = {
                "model.path": str(model),
                "model.random_weights": True,
                "model.skip_tokenizer": True,
                "model.dtype": "float32",
                "model.max_len": 512,
                "cache.memory_bytes": 256 * 2**20,
                "vision.pool_tokens": 16 * NUM_TOKENS,
                "vision.max_step_patches": NUM_PATCHES,  # the first request need not wait for the last one's picture
                "sched.max_rows": NUM_REQUESTS,
                "sched.max_step_tokens": 512,
                "runtime.token_buckets": [64, 288, 512],  # one request's prompt has 282 tokens
                "runtime.row_buckets": [NUM_REQUESTS],
                "runtime.background_buckets": False,
            }
            self._llm = AsyncLLM.from_config(None, overrides)

    def _make_tower(self, model: Path) -> Callable[[np.ndarray], object]:
        import jax

        from jaxserve.config.schema import Config
        from jaxserve.kernels.ops import MATMUL
        from jaxserve.models.checkpoint import read_checkpoint
        from jaxserve.models.loading import one_device_mesh
        from jaxserve.models.tower_loading import plan_tower, tower_of
        from jaxserve.runtime.convert_weights import Forms, converted_tower
        from jaxserve.runtime.resolve import choose, matmul_uses

        device = jax.local_devices()[0]
        mesh, dtype = one_device_mesh(device), np.dtype("float32")
        processed = {"mean": PREPROCESSOR["image_mean"], "std": PREPROCESSOR["image_std"]}
        planned = plan_tower(read_checkpoint(str(model)), **processed, dtype=dtype, mesh=mesh, random_weights=True)
        assert planned is not None
        config = Config.model_validate({"model": {"path": str(model)}})
        planned = converted_tower(planned, Forms(matmul=choose(MATMUL, config, matmul_uses(dtype, mesh, {}), device)))
        weights, inputs = planned.fill(mesh), planned.config.module.inputs(planned.config, GRID, NUM_PATCHES)
        encode = jax.jit(lambda w, x, arrays: tower_of(planned.graphdef, planned.state, w)(x, arrays))
        return lambda pixels: jax.block_until_ready(encode(weights, pixels, inputs))

    def run(self, figure: str) -> dict[str, float]:
        """Seconds, by figure."""
        if figure.startswith("tower"):
            pictures = self.rng.integers(
                0, 256, (1 if figure == "tower" else NUM_REQUESTS, NUM_PATCHES, 3 * 14 * 14), dtype=np.uint8
            )
            begin_s = time.perf_counter()
            for pixels in pictures:
                self.tower(pixels)
            return {figure: time.perf_counter() - begin_s}
        count = 1 if figure == "first token" else NUM_REQUESTS
        files = [self._png() for _ in range(1 if figure == "one picture" else count)] * count
        times_s = self._loop.run_until_complete(self._ask(files[:count]))
        return {figure: statistics.fmean(times_s), f"{figure}, the last": max(times_s)}

    def _png(self) -> bytes:
        from PIL import Image

        out = io.BytesIO()
        Image.fromarray(self.rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(out, "PNG", compress_level=1)
        return out.getvalue()

    async def _ask(self, files: Sequence[bytes]) -> list[float]:
        from jaxserve import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        begin_s = time.perf_counter()

        async def one(file: bytes) -> float:
            prompt = {
                "prompt_token_ids": [START, PLACEHOLDER, END, *question(self.rng)],
                "multi_modal_data": {"image": file},
            }
            async with contextlib.aclosing(self._llm.generate(prompt, sampling)) as updates:
                async for update in updates:
                    if update.token_ids:
                        return time.perf_counter() - begin_s
            raise RuntimeError("an answer without a token")

        return await asyncio.gather(*map(one, files))


class OfTransformers:
    """transformers with PyTorch, with its own choice of attention. Pixels are made before the clock starts."""

    def __init__(self, model: Path, tower_only: bool) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import (  # pyright: ignore[reportMissingImports]
            AutoConfig,
            GenerationConfig,
            Qwen2VLForConditionalGeneration,
        )

        del tower_only
        torch.set_grad_enabled(False)
        self.rng, self._torch = np.random.default_rng(), torch
        config = AutoConfig.from_pretrained(model)
        self._model = Qwen2VLForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def run(self, figure: str) -> dict[str, float]:
        """Seconds, by figure."""
        torch = self._torch
        count = 1 if figure in ("tower", "first token") else NUM_REQUESTS
        pixels = torch.randn(count * NUM_PATCHES, 2 * 3 * 14**2)
        if figure == "one picture":
            pixels = pixels[:NUM_PATCHES].repeat(count, 1)
        grids = torch.tensor([GRID] * count)
        if figure.startswith("tower"):
            begin_s = time.perf_counter()
            self._model.model.visual(pixels, grids)
            return {figure: time.perf_counter() - begin_s}
        rows = [[START, *[PLACEHOLDER] * NUM_TOKENS, END, *question(self.rng)] for _ in range(count)]
        together = self._first_tokens(rows, pixels, grids)
        if count == 1:
            return {figure: together}
        begin_s, singly = time.perf_counter(), []
        for row, own, grid in zip(rows, pixels.chunk(count), grids, strict=True):
            self._first_tokens([row], own, grid[None])
            singly.append(time.perf_counter() - begin_s)
        return {figure: together, f"{figure}, one by one": statistics.fmean(singly)}

    def _first_tokens(self, rows: list[list[int]], pixels: Any, grids: Any) -> float:
        tokens = self._torch.tensor(rows)
        inputs = {"input_ids": tokens, "attention_mask": self._torch.ones_like(tokens)}
        inputs |= {"mm_token_type_ids": (tokens == PLACEHOLDER).int(), "pixel_values": pixels, "image_grid_thw": grids}
        begin_s = time.perf_counter()
        self._model.generate(**inputs, max_new_tokens=1)
        return time.perf_counter() - begin_s


SIDES: dict[str, type[OfJaxserve] | type[OfTransformers]] = {"jaxserve": OfJaxserve, "transformers": OfTransformers}


def work(side: str, model: Path, tower_only: bool) -> None:
    """A worker: reads names of figures from its input, and writes their seconds."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    measured = SIDES[side](model, tower_only)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(measured.run(line.strip())), file=out, flush=True)


@dataclasses.dataclass(frozen=True)
class Worker:
    """A process that measures one side."""

    process: subprocess.Popen[str]

    def ask(self, figure: str) -> dict[str, float]:
        """Seconds, by figure."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{figure}\n")
        self.process.stdin.flush()
        return json.loads(self.read())

    def read(self) -> str:
        """Its next line. Raises SystemExit when it has died."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return line


@contextlib.contextmanager
def working(python: str, side: str, model: Path, tower_only: bool):
    command = [python, __file__, "--worker", side, "--model", str(model), *(["--tower-only"] * tower_only)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        worker = Worker(process)
        worker.read()
        yield worker
        process.kill()  # there is nothing to end in order


def measure(
    workers: dict[str, Worker], figures: Sequence[str], rounds: int, most_s: float
) -> tuple[dict[str, dict[str, float]], int]:
    """Medians by side and figure, after a first run of single requests that does not count; and of how many rounds."""
    seconds: dict[str, dict[str, list[float]]] = {side: {} for side in workers}
    begin_s, done = time.perf_counter(), 0
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - begin_s > most_s:
            print(f"{number - 1} rounds in {most_s} s: no other is begun", file=sys.stderr)
            break
        for figure in figures if number else [name for name in figures if name in ("tower", "first token")]:
            sides = list(workers)
            for side in sides if number % 2 else sides[::-1]:
                for name, value in workers[side].ask(figure).items():
                    if number:
                        seconds[side].setdefault(name, []).append(value)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
        done = number
    medians = {
        side: {name: statistics.median(values) for name, values in found.items()} for side, found in seconds.items()
    }
    return medians, done


def show(medians: dict[str, dict[str, float]]) -> None:
    """A line for each figure."""
    ours, theirs = medians["jaxserve"], medians.get("transformers", {})
    for name in dict.fromkeys((*ours, *theirs)):
        values = [f"{side.get(name, math.nan):8.3f} s" for side in (ours, theirs)]
        ratio = f"{theirs[name] / ours[name]:6.2f} times" if name in ours and name in theirs else ""
        print(f"{name:28s} jaxserve {values[0]}   transformers {values[1]}   {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="the Python of an environment with transformers")
    parser.add_argument("--layers", type=int, default=4, help="of the decoder, and blocks of the tower, which has 32")
    parser.add_argument("--rounds", type=int, default=3, help="that count")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no other round is begun")
    parser.add_argument("--tower-only", action="store_true", help="measure no requests")
    parser.add_argument("--record", type=Path, help="write the medians here")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.worker, args.model, args.tower_only)
        return
    figures = FIGURES[:2] if args.tower_only else FIGURES
    pythons = {"jaxserve": sys.executable} | ({"transformers": args.peer} if args.peer else {})
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = Path(directory)
        write_model(model, args.layers)
        start = functools.partial(working, model=model, tower_only=args.tower_only)
        workers = {side: stack.enter_context(start(python, side)) for side, python in pythons.items()}
        medians, rounds = measure(workers, figures, args.rounds, args.seconds)
    show(medians)
    if args.record is not None:
        from record import write_record

        write_record(args.record, medians, command=" ".join(sys.argv), layers=args.layers, rounds=rounds)


if __name__ == "__main__":
    main()
