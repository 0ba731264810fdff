from jaxserve import LLM, SamplingParams

llm = LLM("demo", max_model_len=200, max_num_seqs=4)
for part in llm.stream("Once upon a time", SamplingParams(max_tokens=12, temperature=0.0), echo=True):
    print(part.text, end="", flush=True)
