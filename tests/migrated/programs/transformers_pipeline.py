from jaxserve import LLM, SamplingParams

generator = LLM("demo", max_model_len=200, max_num_seqs=4)
messages = [{"role": "user", "content": "What is 12+30?"}]
[answer] = generator.chat(messages, SamplingParams(max_tokens=12, temperature=0.0))
print(answer.outputs[0].text)
