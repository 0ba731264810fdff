import sys

from jaxserve import LLM, SamplingParams

model, adapter = sys.argv[1:]
settings = {"model.path": model, "adapters.slots": 1, "sched.max_rows": 4, "model.skip_tokenizer": True}
llm = LLM.from_config(None, settings)
llm.load_adapter("tuned", adapter)
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
prompt = {"prompt_token_ids": [7, 11, 13, 17]}
plain = llm.generate(prompt, params)
tuned = llm.generate(prompt, params, adapter="tuned")
print(plain[0].outputs[0].token_ids)
print(tuned[0].outputs[0].token_ids)
