from jaxserve import LLM, SamplingParams

prompts = ["Once upon a time", "The old lighthouse"]
llm = LLM(
    model="demo",
    max_model_len=200,
    max_num_seqs=4,
)
params = SamplingParams(temperature=0.0, max_tokens=12)
for output in llm.generate(prompts, params):
    print(output.prompt, "->", output.outputs[0].text)
params = params.clone(max_tokens=20)
[answer] = llm.chat([{"role": "user", "content": "What is 12+30?"}], params)
print(answer.outputs[0].text)
