from jaxserve import LLM, SamplingParams

settings = {"model.path": "demo", "model.max_len": 200, "sched.max_rows": 4}
llm = LLM.from_config(None, {**settings, "speculation.method": "ngram", "speculation.width": 4})
params = SamplingParams(temperature=0.0, max_tokens=24)
[output] = llm.generate("The fox ran. The fox ran. The fox", params)
print(output.outputs[0].text)
