from jaxserve import LLM, SamplingParams

name = "demo"
llm = LLM(name, max_model_len=200, max_num_seqs=4)
options = SamplingParams(max_tokens=12, temperature=0.0)
for update in llm.stream("Once upon a time", options):
    print(update.text, end="", flush=True)
