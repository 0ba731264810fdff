"""vLLM's time of a token with LoRA adapters, for scripts/bench_lora.py: a process in vLLM's environment.

    python scripts/peers/lora_vllm.py MODEL STREAMS STEPS RANK [ADAPTER ...]

MODEL is a directory with a config.json; the weights are random. With adapters the engine has a slot for each. The
process says "ready", then answers each line of its input, a JSON list with the number of an adapter or null for each
stream, with the median seconds of a step in which all streams decode: a step gives each of them a token.
"""

import json
import os
import statistics
import sys
import time

PROMPT = 16  # tokens


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    model, streams, steps, rank, *adapters = sys.argv[1:]
    num_streams, num_steps = int(streams), int(steps)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with two cores its own process would take one from the model
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    }
    import numpy as np
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": int(rank)} if adapters else {}
    llm = vllm.LLM(
        model, skip_tokenizer_init=True, seed=0, dtype="float32", load_format="dummy", max_model_len=512,
        max_num_seqs=num_streams, enable_prefix_caching=False, **lora,
    )  # fmt: skip
    engine, rng = llm.llm_engine, np.random.default_rng(0)
    requests = [LoRARequest(f"adapter-{number}", number + 1, path) for number, path in enumerate(adapters)]
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=num_steps, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    print("ready", file=out, flush=True)
    for run, line in enumerate(sys.stdin):
        for row, number in enumerate(json.loads(line)):
            prompt = {"prompt_token_ids": rng.integers(1, 30000, PROMPT).tolist()}
            adapter = None if number is None else requests[number]
            engine.add_request(f"{run}/{row}", prompt, sampling, lora_request=adapter)
        times_s: list[float] = []
        while engine.has_unfinished_requests():
            begin_s = time.perf_counter()
            outputs = engine.step()
            taken_s = time.perf_counter() - begin_s
            if len(outputs) == num_streams and all(len(output.outputs[0].token_ids) == 1 for output in outputs):
                times_s.append(taken_s)
        print(json.dumps(statistics.median(times_s[1:])), file=out, flush=True)  # the first may hold a prompt


if __name__ == "__main__":
    main()
