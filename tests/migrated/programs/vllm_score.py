from jaxserve import LLM

llm = LLM.from_config(
    None,
    overrides={
        "model.path": "demo",
        "model.max_len": 200,
        "sched.max_rows": 4,
        "rerank.template": "<|user|>{query} Is this an answer, y or n? {document}<|end|><|assistant|>",
        "rerank.negative": "n",
        "rerank.positive": "y",
    },
)
query = "What do cows eat?"
texts = ["Cows eat grass.", "Snow is white."]
outputs = llm.score(query, texts)
for text, output in zip(texts, outputs, strict=True):
    print(text, round(output.outputs.score, 3))
