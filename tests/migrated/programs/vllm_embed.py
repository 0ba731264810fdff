from jaxserve import LLM

llm = LLM(model="demo", max_model_len=200, max_num_seqs=4)
texts = ["a red fox", "a red dog", "seven hundred and six"]
vectors = [output.outputs.embedding for output in llm.embed(texts)]
for text, vector in zip(texts, vectors, strict=True):
    print(text, round(sum(a * b for a, b in zip(vectors[0], vector, strict=True)), 3))
